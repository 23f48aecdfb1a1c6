"""Running the server: the engine starts, uvicorn serves, and SIGTERM lets running requests finish first."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context
from pathlib import Path

import uvicorn
import uvloop
from fastapi import FastAPI

from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.engine.timeouts import Timeouts
from vllm_blend.engine_args import EngineArgs
from vllm_blend.entrypoints.openai.app import create_app
from vllm_blend.entrypoints.openai.connection import ConnectionLimits, limited_protocol
from vllm_blend.entrypoints.openai.logs import configure_logging
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.server import Server
from vllm_blend.entrypoints.openai.tenancy import Tenants
from vllm_blend.entrypoints.openai.tracing import Tracing
from vllm_blend.entrypoints.verdicts import announce

logger = logging.getLogger(__name__)

BACKLOG = 2048  # connections that wait to be accepted, as in uvicorn
OTHER_FILES = 256  # that a server has open besides its connections
FULL_COLLECTION = 25  # smaller collections between two full ones, instead of Python's 10; some garbage waits for them


def run_server(args: EngineArgs, options: ServerOptions) -> int:
    """Serve until SIGTERM or SIGINT. Raises ValueError or OSError for what is wrong before the model is loaded."""
    configure_logging(options.log_format, options.uvicorn_log_level, not options.disable_access_log)
    # What is wrong with a file is an error before the model is loaded. Keys are read once: they may come from a pipe.
    tenants = Tenants.from_options(options.api_key, options.api_keys)
    check_certificate(options)
    endpoint = options.otlp_traces_endpoint
    tracing = None if endpoint is None else Tracing.to_endpoint(endpoint)
    config = args.create_engine_config()
    if config.blend.enable_blending:
        announce(config, options.require_verdict)
    allow_files(options.max_connections)
    with listening(options) as listener:
        timeouts = Timeouts(options.heartbeat_timeout, options.step_timeout)
        queued = options.max_queued_requests
        engine = AsyncLLM.from_engine_args(args, max_queued_requests=queued, timeouts=timeouts)
        try:
            app = create_app(engine, options, tracing, tenants)
            _spare_collections()
            logger.info("serving %s at %s", app.state.server.model_name, address(listener, options))
            uvloop.run(serve(app, listener, options))
        finally:
            engine.shutdown()
            if tracing is not None:
                tracing.close()
    return 0


@contextmanager
def listening(options: ServerOptions) -> Iterator[socket.socket]:
    """Listen as long as the context lasts; the file of a Unix socket is removed in the end."""
    with bind(options) as listener:
        try:
            yield listener
        finally:
            if options.uds is not None:
                Path(options.uds).unlink(missing_ok=True)


def _spare_collections() -> None:
    """Have the garbage collector look at everything less often: it stops the event loop meanwhile, for 0.1 s and more
    if a large answer is being written. What is loaded stays, so it need not be looked at."""
    gc.collect()
    gc.freeze()
    youngest, middle, _ = gc.get_threshold()
    gc.set_threshold(youngest, middle, FULL_COLLECTION)


def allow_files(num_connections: int) -> None:
    """Raise this process's limit on open files so that it can hold so many connections, as far as the system allows."""
    wanted = num_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "the system allows %d open files, which is less than --max-connections %d and %d other files need: raise "
            "`ulimit -n`, or lower --max-connections",
            *(allowed, num_connections, OTHER_FILES),
        )


def check_certificate(options: ServerOptions) -> None:
    """Raise ValueError if the files for TLS cannot be used."""
    if options.ssl_certfile is None:
        return

    def refuse() -> str:
        raise ValueError("the key needs a password, which a server cannot be asked for")

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, refuse)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"ssl_certfile={options.ssl_certfile!r} and ssl_keyfile={options.ssl_keyfile!r} cannot be used ({error}): "
            "give a certificate and its key, without a password, as PEM files"
        ) from error


def bind(options: ServerOptions) -> socket.socket:
    """Return a listening socket. Raises OSError that names the address.

    It listens before the model is loaded, as only then the system refuses the address to another server: connections
    wait until the model is there.
    """
    is_unix, is_ipv6 = options.uds is not None, ":" in options.host
    family = socket.AF_UNIX if is_unix else socket.AF_INET6 if is_ipv6 else socket.AF_INET
    # asyncio sends small packets at once only on sockets that name TCP: without it the first token comes after the
    # client's delayed acknowledgement of the headers, some 40 ms later.
    listener = socket.socket(family, socket.SOCK_STREAM, 0 if is_unix else socket.IPPROTO_TCP)
    try:
        if options.uds is not None:
            _remove_stale_socket(Path(options.uds))
            listener.bind(options.uds)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((options.host, options.port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        where = options.uds or f"{options.host}:{options.port}"
        raise OSError(f"cannot listen on {where}: {error}; use another --host, --port or --uds") from error
    return listener


def _remove_stale_socket(path: Path) -> None:
    """Remove the socket that a server which was killed has left. Raises OSError for a path that is something else, or
    on which another server listens."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(kind):
        raise OSError("there is a file that is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
    raise OSError("another server listens there")


def address(listener: socket.socket, options: ServerOptions) -> str:
    """Return the address that clients use."""
    if options.uds is not None:
        return options.uds
    host, port = listener.getsockname()[:2]
    return f"{'https' if options.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class DrainingServer(uvicorn.Server):
    """A uvicorn server that lets running requests finish before it stops: new ones get 503 meanwhile."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: object) -> None:
        """Begin to drain at the first signal; stop at once at the second.

        uvicorn's own method would raise the signal again at the end, which kills the process before the engine has
        written what its chunk stores still have to write.
        """
        if self._server.is_draining:
            self.should_exit = self.force_exit = True
            return
        self._server.is_draining = True
        # Not in the context of the request that the signal has interrupted: its id would be in the lines logged.
        self._loop.call_soon_threadsafe(self._begin_draining, context=Context())

    def _begin_draining(self) -> None:
        logger.info("draining: up to %g s for running requests", self._server.options.shutdown_timeout)
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._server.engine.drain(self._server.options.shutdown_timeout)
        finally:
            self.should_exit = True


async def serve(app: FastAPI, listener: socket.socket, options: ServerOptions) -> None:
    """Serve an application on a socket until a signal ends it."""
    server = new_server(app, options)
    had_terminal = os.isatty(0)

    def on_hangup() -> None:
        if had_terminal and _terminal_is_gone():
            server.handle_exit(signal.SIGHUP, None)
        else:
            reload_files(app, server.config, options)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_hangup)
    try:
        await server.serve(sockets=[listener])
    finally:
        app.state.server.close()


def reload_files(app: FastAPI, config: uvicorn.Config, options: ServerOptions) -> None:
    """Read the keys and the certificate again. Requests and connections that are there go on with what they have; if a
    file is wrong, all stays as it is, and the log says why."""
    tenants: Tenants = app.state.tenants
    try:
        others = Tenants.from_options(options.api_key, options.api_keys, tenants)
        check_certificate(options)
        if options.ssl_certfile is not None and config.ssl is not None:
            config.ssl.load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except (OSError, ValueError) as error:
        logger.error("the keys and the certificate stay as they are: %s", error)
        return
    tenants.replace(others)
    logger.info("the keys and the certificate have been read again")


def _terminal_is_gone() -> bool:
    """Return whether the terminal that the server was started in has been closed."""
    try:
        os.tcgetpgrp(0)
    except OSError:
        return True
    return False


def new_server(app: FastAPI, options: ServerOptions) -> DrainingServer:
    """Return what serves an application in the event loop that runs."""
    limits = ConnectionLimits(
        options.max_header_size,
        options.max_header_count,
        options.header_timeout,
        options.max_connections,
        options.write_timeout,
    )
    server: Server = app.state.server
    config = uvicorn.Config(
        app,
        http=limited_protocol(limits, server.metrics.recorder.count_refused),
        ws="none",
        timeout_keep_alive=options.timeout_keep_alive,
        log_config=None,
        access_log=False,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        timeout_graceful_shutdown=5,
        server_header=False,
    )
    return DrainingServer(config, server)
