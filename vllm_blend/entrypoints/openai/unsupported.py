"""What other servers have and this one does not: answered by name, with the reason."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from vllm_blend.entrypoints.openai.errors import APIError
from vllm_blend.unsupported import NO_POOLING, NO_PROFILER

router = APIRouter(include_in_schema=False)

_NO_LORA = "LoRA adapters are not loaded: merge the adapter into the weights and serve the merged model"
_NO_AUDIO = "the supported models take and give text only"
_NO_STATE = "this server keeps no state between requests: send the whole conversation"
_NO_SLEEP = "the engine cannot sleep: stop the server to free its memory"
UNSUPPORTED_ENDPOINTS: dict[str, str] = {
    "/v1/embeddings": NO_POOLING,
    "/v2/embed": NO_POOLING,
    "/pooling": NO_POOLING,
    "/classify": NO_POOLING,
    "/score": NO_POOLING,
    "/v1/score": NO_POOLING,
    "/rerank": NO_POOLING,
    "/v1/rerank": NO_POOLING,
    "/v2/rerank": NO_POOLING,
    "/v1/audio/{name}": _NO_AUDIO,
    "/v1/realtime": _NO_AUDIO,
    "/v1/images/{name}": _NO_AUDIO,
    "/v1/moderations": NO_POOLING,
    "/v1/load_lora_adapter": _NO_LORA,
    "/v1/unload_lora_adapter": _NO_LORA,
    "/v1/files": _NO_STATE,
    "/v1/batches": _NO_STATE,
    "/v1/fine_tuning/jobs": "models are trained offline: see `vllm-blend finetune`",
    "/v1/assistants": _NO_STATE,
    "/v1/threads": _NO_STATE,
    "/v1/conversations": _NO_STATE,
    "/start_profile": NO_PROFILER,
    "/stop_profile": NO_PROFILER,
    "/sleep": _NO_SLEEP,
    "/wake_up": _NO_SLEEP,
}


async def _refuse(request: Request) -> Response:
    path = request.scope["route"].path
    raise APIError(
        404, f"{request.url.path} is not supported: {UNSUPPORTED_ENDPOINTS[path]}", code="unsupported_endpoint"
    )


for _path in UNSUPPORTED_ENDPOINTS:
    router.add_api_route(_path, _refuse, methods=["GET", "POST"])
