"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from vllm_blend.entrypoints.openai.protocol.others import ModelCard, ModelList
from vllm_blend.entrypoints.openai.server import Server, server_of

router = APIRouter()


@router.get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> Response:
    """List the names of the model that is served."""
    server = server_of(request)
    listed = ModelList(object="list", data=[_card(server, name) for name in server.model_names])
    return Response(listed.model_dump_json(), media_type="application/json")


@router.get("/v1/models/{name:path}", response_model=ModelCard)
async def get_model(name: str, request: Request) -> Response:
    """Describe the model that is served."""
    server = server_of(request)
    server.check_model(name)
    return Response(_card(server, name).model_dump_json(), media_type="application/json")


def _card(server: Server, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=server.created,
        owned_by="vllm-blend",
        root=server.engine.config.model.model,
        max_model_len=server.engine.max_model_len,
    )
