"""/metrics, the status page at /, and /status, which it reads."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from vllm_blend.entrypoints.openai.metrics.server_metrics import ServerMetrics

router = APIRouter()
# The page is one file, which loads nothing and talks to this server alone.
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
}


@cache
def status_page() -> str:
    """Return the HTML of the status page."""
    return (files("vllm_blend.entrypoints.openai.metrics") / "status.html").read_text(encoding="utf-8")


@router.get("/metrics", response_class=PlainTextResponse)
async def get_metrics(request: Request) -> Response:
    """Return the metrics of the server and its engine in Prometheus's text format."""
    return Response(await _metrics(request).text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/status")
async def get_status(request: Request) -> dict[str, Any]:
    """Return what the status page shows."""
    return await _metrics(request).status()


@router.get("/", include_in_schema=False)
async def get_page() -> HTMLResponse:
    return HTMLResponse(status_page(), headers=_HEADERS)


def _metrics(request: Request) -> ServerMetrics:
    metrics: ServerMetrics = request.app.state.server.metrics
    return metrics
