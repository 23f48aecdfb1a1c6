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
from vllm_blend.entrypoints.openai.metrics import endpoints as watching
from vllm_blend.entrypoints.openai.middleware import RequestContext
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.protocol.common import ErrorResponse
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
    watching,
    unsupported,
)
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": text}
    for status, text in {
        400: "The request is wrong",
        401: "The API key is missing or unknown",
        404: "There is no such model or endpoint",
        413: "The body is too large",
        415: "The body is not JSON",
        429: "Too many requests wait",
        503: "The engine is down, or the server is shutting down",
        504: "The request took too long",
    }.items()
}


def create_app(engine: AsyncLLM, options: ServerOptions | None = None, tracing: Tracing | None = None) -> FastAPI:
    """Return the application that serves `engine`; requests have spans with `tracing`. Raises ValueError for options
    that are wrong."""
    options = ServerOptions() if options is None else options
    has_docs = not options.disable_fastapi_docs
    app = FastAPI(
        title="vllm-blend",
        summary="An OpenAI server in which every passage is reusable",
        root_path=options.root_path,
        openapi_url="/openapi.json" if has_docs else None,
        responses=_ERRORS,
        strict_content_type=False,
    )
    app.state.server = Server(engine, options, tracing)
    for module in _ROUTERS:
        app.include_router(module.router)
    install_error_handlers(app)
    app.add_exception_handler(ClientDisconnected, _answer_disconnected)
    tenants = Tenants.from_options(options.api_key, options.api_keys)
    app.add_middleware(
        RequestContext,
        tenants=tenants,
        max_body_size=options.max_body_size,
        logs_access=not options.disable_access_log,
    )
    if options.allowed_origins:  # outermost: pages must be able to read errors, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id"],
        )
    _without_422(app)
    return app


async def _answer_disconnected(_: Request, __: Exception) -> Response:
    return Response(status_code=499)


def _without_422(app: FastAPI) -> None:
    """Leave FastAPI's own errors out of the API's description: bodies that do not fit are answered by 400."""
    describe = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = describe()
            for operations in schema["paths"].values():
                for operation in operations.values():
                    operation.get("responses", {}).pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(name, None)
        return dict(app.openapi_schema or schema)

    app.openapi = openapi  # type: ignore[method-assign]
