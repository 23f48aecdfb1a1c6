"""GET /health, /ping and /version."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Request, Response

from vllm_blend.entrypoints.openai.errors import APIError
from vllm_blend.entrypoints.openai.protocol.others import VersionResponse
from vllm_blend.entrypoints.openai.server import server_of

router = APIRouter()


@router.get("/health", response_class=Response)
@router.get("/ping", response_class=Response)
@router.post("/ping", response_class=Response)
async def health(request: Request) -> Response:
    """Answer 200 while the engine runs, and 503 while it is down or the server is about to stop."""
    server = server_of(request)
    if server.is_draining:
        raise APIError(503, "the server is shutting down", code="shutting_down")
    await server.engine.check_health()
    return Response(status_code=200)


@router.get("/version", response_model=VersionResponse)
async def show_version() -> Response:
    """Return the version of vllm-blend."""
    return Response(VersionResponse(version=version("vllm-blend")).to_json(), media_type="application/json")
