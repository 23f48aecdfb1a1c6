"""A server for the tests: uvicorn on real sockets, in a thread of its own, over an engine in its own process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import uvicorn
import uvloop
from fastapi import FastAPI

from tests import settings
from tests.engine.engines import ROOT, threads
from tests.waiting import DEADLINE, wait_until
from vllm_blend import EngineArgs
from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.engine.errors import EngineDeadError, QueueFullError
from vllm_blend.entrypoints.openai.app import create_app
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.run import DrainingServer, address, bind, new_server

T = TypeVar("T")
REUSE_DEMO = str(ROOT / "inputs" / "demo-model-reuse")
NAME = "demo"
ENGINE = {"enable_blending": True, "max_logprobs": 20, "num_gpu_blocks_override": 512}
# A message is its text and a blank line.
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['content'] %}{{ m['content'] }}\n\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)


def engine_args() -> dict[str, Any]:
    """Return the engine's arguments. Templates here put nothing before the first passage, so that the default company
    would not be that of all passages."""
    return {"model": REUSE_DEMO, "blend_encoding_context": "page", **settings.current().engine_arguments(), **ENGINE}


class TestServer:
    """A running server. `call` runs a coroutine in its event loop. At `plain_url` the same engine is served as by
    `vllm-blend serve` without options, with the model's own chat template."""

    __test__ = False

    def __init__(self) -> None:
        with threads(1):
            self.engine = AsyncLLM.from_engine_args(EngineArgs(**engine_args()), max_queued_requests=64)
        options = ServerOptions(served_model_name=[NAME, "alias"], chat_template=TEMPLATE, max_body_size=1 << 20)
        self.app = create_app(self.engine, options)
        self._servers = [
            _Listening(self.app),
            _Listening(create_app(self.engine, ServerOptions())),
        ]
        self.address = self._servers[0].address
        self.url, self.plain_url = (f"http://127.0.0.1:{each.address[1]}" for each in self._servers)
        self.loop = uvloop.new_event_loop()  # the server's own kind
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()
        wait_until(lambda: all(each.server.started for each in self._servers))

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(DEADLINE)

    def metrics(self) -> dict[str, float]:
        return {metric.name: metric.value for metric in self.call(self.engine.get_metrics())}

    def post(self, path: str, **arguments: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=DEADLINE, **arguments)

    def close(self) -> None:
        for each in self._servers:
            each.server.should_exit = True
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive(), "the server did not stop"
        self.loop.close()
        for each in self._servers:
            each.app.state.server.close()
        self.engine.shutdown()

    def _run(self) -> None:
        serving = [each.server.serve(sockets=[each.socket]) for each in self._servers]
        self.loop.run_until_complete(asyncio.wait([self.loop.create_task(each) for each in serving]))


class _Listening:
    """A socket, and an application that will answer at it."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # little is on its way to a slow reader
        self.address: tuple[str, int] = self.socket.getsockname()
        self.server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False))


def fake_engine(is_full: bool = False, is_down: bool = False) -> Any:
    """Return an engine that is asked for nothing but its health: servers of it start at once."""

    async def check_health() -> None:
        if is_down:
            raise EngineDeadError("it is down")

    def check_room(_: int = 1, tenant: str = "") -> None:
        if is_full:
            raise QueueFullError("it is full", 1.5)
        if is_down:
            raise EngineDeadError("it is down")

    config = SimpleNamespace(model=SimpleNamespace(model="m"))
    return SimpleNamespace(config=config, max_model_len=8, check_health=check_health, check_room=check_room)


@contextmanager
def serving(engine: AsyncLLM, running: list[DrainingServer] | None = None, **settings: Any) -> Iterator[str]:
    """Serve an engine, which other servers may use as well, as `vllm-blend serve` does with these options; the URL or
    the socket's path. The server is added to `running`."""
    fixed: dict[str, Any] = {"port": 0, "served_model_name": [NAME], "chat_template": TEMPLATE}
    options = ServerOptions(**fixed | settings)
    app, started = create_app(engine, options), Future[DrainingServer]()

    async def serve() -> None:
        server = new_server(app, options)
        started.set_result(server)
        await server.serve(sockets=[listener])

    with bind(options) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
        thread.start()
        server = started.result(DEADLINE)
        try:
            wait_until(lambda: server.started)
            if running is not None:
                running.append(server)
            yield address(listener, options)
        finally:
            server.should_exit = True
            thread.join(DEADLINE)
            app.state.server.close()
