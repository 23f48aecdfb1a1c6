"""Where a server listens and how it is reached: TLS, a Unix domain socket, web pages of other origins."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from tests.entrypoints.openai.servers import TestServer, serving
from tests.waiting import DEADLINE
from vllm_blend import EngineArgs
from vllm_blend.engine.async_llm import AsyncLLM
from vllm_blend.engine.timeouts import Timeouts
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.run import (
    DrainingServer,
    bind,
    check_certificate,
    listening,
    reload_files,
    run_server,
)
from vllm_blend.entrypoints.serve import parse
from vllm_blend.log_lines import REQUEST_ID

pytestmark = pytest.mark.cpu_only

BODY = {"prompt": "a", "max_tokens": 1}
PAGE = {"Origin": "https://app.example"}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The files of a certificate for 127.0.0.1 and of its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


def make_certificate(folder: Path) -> tuple[str, str]:
    files = str(folder / "cert.pem"), str(folder / "key.pem")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=test"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", files[0], "-keyout", files[1]]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return files


def test_tls(server: TestServer, certificate: tuple[str, str]) -> None:
    cert, key = certificate
    with serving(server.engine, ssl_certfile=cert, ssl_keyfile=key) as url:
        assert url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=cert)
        answer = httpx.post(f"{url}/v1/completions", json=BODY, verify=trusting, timeout=DEADLINE)
        assert answer.status_code == 200 and answer.json()["choices"]
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{url}/health", timeout=DEADLINE)
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{url.replace('https', 'http')}/health", timeout=DEADLINE)


def test_files_are_read_again_while_a_stream_goes_on(
    server: TestServer, certificate: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New connections see the new certificate, and new requests the new keys. With a wrong file all stays."""
    cert, key, keys = (tmp_path / name for name in ("cert.pem", "key.pem", "keys"))
    for path, source in ((cert, certificate[0]), (key, certificate[1])):
        path.write_bytes(Path(source).read_bytes())
    keys.write_text("alice old\n")
    settings: dict[str, Any] = {"ssl_certfile": str(cert), "ssl_keyfile": str(key), "api_keys": str(keys)}
    options = ServerOptions(port=0, **settings)

    def status(url: str, api_key: str) -> int:
        headers = {"Authorization": f"Bearer {api_key}"}
        return httpx.get(f"{url}/v1/models", headers=headers, verify=False, timeout=DEADLINE).status_code

    def shown(url: str) -> str:
        return ssl.get_server_certificate(("127.0.0.1", int(url.rpartition(":")[2])), timeout=DEADLINE)

    running: list[DrainingServer] = []
    with serving(server.engine, running=running, **settings) as url:
        [uvicorn_server] = running
        app: Any = uvicorn_server.config.app
        body = {"prompt": "a", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json=body,
            headers={"Authorization": "Bearer old"},
            verify=False,
            timeout=DEADLINE,
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            before = shown(url)
            make_certificate(tmp_path)
            keys.write_text("alice old new words\n")
            reload_files(app, uvicorn_server.config, options)
            assert "stay as they are: api_keys: line 1" in caplog.text and status(url, "old") == 200
            assert shown(url) == before
            keys.write_text("alice new\n")
            reload_files(app, uvicorn_server.config, options)
            assert (status(url, "old"), status(url, "new")) == (401, 200) and shown(url) != before
            assert "[DONE]" in "".join(lines)


def test_packets_are_sent_at_once() -> None:
    """The first token does not wait until the client has acknowledged the headers."""

    async def delay_is_off() -> bool:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            socket_ = writer.get_extra_info("socket")
            accepted.set_result(socket_.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with bind(ServerOptions(port=0)) as listener:
            async with await asyncio.start_server(accept, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                writer.close()
                return bool(await accepted)

    assert asyncio.run(delay_is_off())


def test_what_is_no_certificate(certificate: tuple[str, str], tmp_path: Path) -> None:
    """It is said before the model is loaded, and a key's password is not asked for."""
    cert, key = certificate
    locked = str(tmp_path / "locked.pem")
    subprocess.run(["openssl", "ec", "-aes256", "-passout", "pass:a", "-in", key, "-out", locked], check=True)
    for bad, message in ((locked, "needs a password"), (cert, "cannot be used"), ("missing.pem", "No such file")):
        with pytest.raises(ValueError, match=message) as caught:
            check_certificate(ServerOptions(ssl_certfile=cert, ssl_keyfile=bad))
        assert "ssl_keyfile" in str(caught.value)
    check_certificate(ServerOptions(ssl_certfile=cert, ssl_keyfile=key))


def test_a_unix_socket(server: TestServer, tmp_path: Path) -> None:
    """A socket that a killed server has left is replaced. A file that is none, and a socket in use, are not."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with serving(server.engine, uds=str(path)) as where:
        assert where == str(path)
        with httpx.Client(transport=httpx.HTTPTransport(uds=where), base_url="http://server") as client:
            answer = client.post("/v1/completions", json=BODY, timeout=DEADLINE)
            assert answer.status_code == 200 and answer.headers["x-request-id"]
        with pytest.raises(OSError, match="another server listens there"):
            bind(ServerOptions(uds=where))
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(OSError, match="a file that is no socket"):
        bind(ServerOptions(uds=str(file)))
    assert file.read_text() == "precious"


def test_an_address_is_taken_from_the_start(tmp_path: Path) -> None:
    """A second server fails while the first one still loads its model, and leaves the first one's socket as it is."""
    path = tmp_path / "socket"
    with listening(ServerOptions(uds=str(path))):
        with pytest.raises(OSError, match=f"cannot listen on {path}: another server listens there"):
            bind(ServerOptions(uds=str(path)))
        assert path.is_socket()
    assert not path.exists()
    with listening(ServerOptions(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: .*in use; use another --host, --port"):
            bind(ServerOptions(port=port))
    with listening(ServerOptions(port=port)):  # and is free again at once
        pass


def test_connections_are_taken_while_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restored_logging: None
) -> None:
    """The engine gets what the flags say of its queue and of when it hangs. If it cannot be loaded, nothing is left."""
    path, loaded = tmp_path / "socket", []

    def load(args: EngineArgs, **given: Any) -> None:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        loaded.append((args.model, given))
        raise OSError("it cannot be loaded")

    monkeypatch.setattr(AsyncLLM, "from_engine_args", load)
    flags = {"--uds": path, "--max-queued-requests": 5, "--heartbeat-timeout": 7, "--step-timeout": 8}
    with pytest.raises(OSError, match="it cannot be loaded"):
        run_server(*parse(["m", *(str(each) for pair in flags.items() for each in pair)]))
    assert loaded == [("m", {"max_queued_requests": 5, "timeouts": Timeouts(heartbeat=7.0, step=8.0)})]
    assert not path.exists()


def test_pages_of_other_origins(server: TestServer) -> None:
    """They can read errors, too, those included that come before the endpoints."""
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with (
        serving(server.engine, allowed_origins=["https://app.example"], api_key=["secret"], max_body_size=100) as url,
        httpx.Client(base_url=url, timeout=DEADLINE) as client,
    ):
        answer = client.options("/v1/completions", headers=PAGE | asks)
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE["Origin"]
        own = PAGE | {"Authorization": "Bearer secret"}
        for headers, body, status in ((own, b"{}", 400), (PAGE, b"{}", 401), (own, b"{}" * 100, 413)):
            answer = client.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == status and answer.headers["access-control-allow-origin"] == PAGE["Origin"]
            assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()
        other = {"Origin": "https://other.example"}
        assert client.options("/v1/completions", headers=other | asks).status_code == 400
        assert "access-control-allow-origin" not in client.post("/v1/completions", headers=own | other).headers
    assert "access-control-allow-origin" not in server.post("/v1/completions", json=BODY, headers=PAGE).headers


def test_origins_on_the_command_line() -> None:
    """Several arguments, or JSON as in vLLM."""
    both = ["https://a.example", "http://b.example:8080"]
    for given in (both, ['["https://a.example", "http://b.example:8080"]']):
        assert parse(["m", "--allowed-origins", *given])[1].allowed_origins == both
    assert parse(["m", "--allowed-origins", '["*"]'])[1].allowed_origins == ["*"]
    for wrong in ("a.example", "https://a.example/", "['*']"):
        with pytest.raises(ValueError, match="is no origin"):
            parse(["m", "--allowed-origins", wrong])


def test_a_second_signal_does_not_wait() -> None:
    """The first one waits for what runs, the second one for nothing. A request that a signal interrupts has no part in
    it: what is logged meanwhile is not that request's."""
    drains_for: list[str | None] = []

    async def send_both() -> None:
        drained = asyncio.Event()
        REQUEST_ID.set("interrupted")

        async def drain(_: float) -> None:
            drains_for.append(REQUEST_ID.get())
            await drained.wait()

        engine = SimpleNamespace(drain=drain)
        state: Any = SimpleNamespace(engine=engine, options=ServerOptions(), is_draining=False)
        server = DrainingServer(uvicorn.Config(FastAPI(), log_config=None), state)
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert state.is_draining and not server.should_exit and drains_for == [None]
        server.handle_exit(signal.SIGTERM, None)
        assert server.should_exit and server.force_exit
        drained.set()

    asyncio.run(send_both())
