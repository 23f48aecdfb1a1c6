"""GET /health, /ready, /ping and /version."""

from __future__ import annotations

import math
from functools import cache
from importlib.metadata import version

from fastapi import APIRouter, Request, Response

from vllm_blend.engine.errors import QueueFullError
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


@router.get("/ready", response_class=Response)
async def ready(request: Request) -> Response:
    """Answer 200 if a request sent now would be taken, and 503 otherwise: the engine is down or hangs, the server is
    about to stop, or the queue is full. For load balancers; `/health` says whether to start the server again."""
    server = server_of(request)
    if server.is_draining:
        raise APIError(503, "the server is shutting down", code="shutting_down")
    try:
        server.engine.check_room()
    except QueueFullError as error:
        seconds = max(1, math.ceil(error.retry_after))
        raise APIError(503, str(error), code="queue_full", headers={"Retry-After": str(seconds)}) from error
    return Response(status_code=200)


@router.get("/version", response_model=VersionResponse)
async def show_version() -> Response:
    """Return the version of vllm-blend."""
    return Response(VersionResponse(version=_version()).to_json(), media_type="application/json")


@cache
def _version() -> str:
    """Return what the package's metadata say: reading them takes a millisecond."""
    return version("vllm-blend")
