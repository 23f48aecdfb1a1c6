"""The FastAPI application: endpoints, errors, and what happens to every request."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.middleware.cors import CORSMiddleware

from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.entrypoints.openai import (
    chat_completions,
    chunks,
    completions,
    health,
    messages,
    models,
    responses,
    tokenization,
    unsupported,
)
from vllm_blend.entrypoints.openai.errors import install_error_handlers
from vllm_blend.entrypoints.openai.generation import ClientDisconnected
from vllm_blend.entrypoints.openai.metrics import endpoints as metrics_endpoints
from vllm_blend.entrypoints.openai.middleware import OPEN_PATHS, RequestContext
from vllm_blend.entrypoints.openai.openapi import ERRORS, describe_fully
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.server import Server
from vllm_blend.entrypoints.openai.tenancy import Tenants
from vllm_blend.entrypoints.openai.tracing import Tracing

_ROUTERS = (
    completions,
    chat_completions,
    responses,
    messages,
    chunks,
    models,
    tokenization,
    health,
    metrics_endpoints,
    unsupported,
)


def create_app(
    engine: AsyncLLM,
    options: ServerOptions | None = None,
    tracing: Tracing | None = None,
    tenants: Tenants | None = None,
) -> FastAPI:
    """Return the application that serves `engine`; requests have spans with `tracing`. `tenants` are those of the
    options' keys if these have been read already. Raises ValueError for options that are wrong."""
    options = ServerOptions() if options is None else options
    has_docs = not options.disable_fastapi_docs
    app = FastAPI(
        title="vllm-blend",
        summary="An OpenAI server in which every passage is reusable",
        openapi_url="/openapi.json" if has_docs else None,
        responses=ERRORS,
        strict_content_type=False,
    )
    app.state.server = Server(engine, options, tracing)
    app.state.tenants = Tenants.from_options(options.api_key, options.api_keys) if tenants is None else tenants
    for module in _ROUTERS:
        app.include_router(module.router)
    install_error_handlers(app)
    app.add_exception_handler(ClientDisconnected, _answer_disconnected)
    app.add_middleware(
        RequestContext,
        tenants=app.state.tenants,
        max_body_size=options.max_body_size,
        logs_access=not options.disable_access_log,
        root_path=options.root_path,
        body_timeout=options.body_timeout,
        on_refused=app.state.server.metrics.recorder.count_refused,
        pace=app.state.server.pace,
    )
    if options.allowed_origins:  # outermost: pages must be able to read errors, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    _extend_description(app, bool(options.api_key or options.api_keys))
    return app


async def _answer_disconnected(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


def _extend_description(app: FastAPI, has_keys: bool) -> None:
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe_fully(describe, has_keys, OPEN_PATHS)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
