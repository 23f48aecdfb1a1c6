"""A replica: an engine and the server's application, behind a method instead of a socket."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from ray import serve
from starlette.types import Message

from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.engine.timeouts import Timeouts
from vllm_blend.engine_args import EngineArgs
from vllm_blend.entrypoints.openai.app import create_app
from vllm_blend.entrypoints.openai.logs import configure_logging
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.tenancy import Tenants
from vllm_blend.entrypoints.openai.tracing import Tracing
from vllm_blend.ray.forwarding import ForwardedRequest, RoutingKey, answer

logger = logging.getLogger(__name__)

REPLICA_HEADER = b"x-vllm-blend-replica"


class Replica:
    """Serves the requests that an `Ingress` forwards, as `vllm-blend serve` would."""

    def __init__(self, args: EngineArgs, options: ServerOptions) -> None:
        """Start the engine and wait until the model is loaded. Raises the errors of `run_server`."""
        configure_logging(options.log_format, options.uvicorn_log_level, not options.disable_access_log)
        tenants = Tenants.from_options(options.api_key, options.api_keys)
        endpoint = options.otlp_traces_endpoint
        self._tracing = None if endpoint is None else Tracing.to_endpoint(endpoint)
        self._name = serve.get_replica_context().replica_id.unique_id.encode()
        timeouts = Timeouts(options.heartbeat_timeout, options.step_timeout)
        self._engine = AsyncLLM.from_engine_args(
            args, max_queued_requests=options.max_queued_requests, timeouts=timeouts
        )
        self._app = create_app(self._engine, options, self._tracing, tenants)

    async def forward(self, request: ForwardedRequest, key: RoutingKey) -> AsyncGenerator[Message, None]:
        """Yield the answer to a request as the messages of ASGI, with this replica's name as a header. `key` is for the
        router."""
        async with aclosing(answer(self._app, request)) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message["headers"], (REPLICA_HEADER, self._name)]
                yield message

    async def check_health(self) -> None:
        """Raise EngineDeadError while the engine is down: Ray Serve replaces a replica for which that lasts."""
        await self._engine.check_health()

    async def __del__(self) -> None:
        """End the engine when its chunk store is written. Ray Serve has waited for running requests before."""
        if hasattr(self, "_app"):
            self._app.state.server.close()
            self._engine.shutdown()
            if self._tracing is not None:
                self._tracing.close()
