"""`vllm-blend serve`: its command line, and a process of it from start to SIGTERM."""

from __future__ import annotations

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.engine.engines import ROOT
from tests.entrypoints.openai.servers import REUSE_DEMO, TEMPLATE
from tests.waiting import DEADLINE, wait_until
from vllm_blend.engine_args import OPTIONS
from vllm_blend.entrypoints.serve import SERVER_OPTIONS, main, parse
from vllm_blend.entrypoints.vllm_flags import CHANGE_NOTHING, UNSUPPORTED, _is_switch

pytestmark = pytest.mark.cpu_only


class Closing(logging.Handler):
    """Another library's handler, which must outlive a server."""

    is_closed = False

    def close(self) -> None:
        self.is_closed = True
        super().close()


USER = {"role": "user", "content": "a"}


def test_flags() -> None:
    args, options = parse([REUSE_DEMO, "--port", "8001", "--max-model-len", "512", "--served-model-name", "a", "b"])
    assert (args.model, args.max_model_len) == (REUSE_DEMO, 512)
    assert args.enable_blending and args.max_logprobs == 20  # other defaults than offline
    assert (options.port, options.served_model_name) == (8001, ["a", "b"])
    args, options = parse(["--model", "m", "--no-enable-blending", "--max-logprobs", "5", "--no-detect-chunks"])
    assert (args.model, args.enable_blending, args.max_logprobs) == ("m", False, 5) and not options.detect_chunks


def test_flags_that_change_nothing_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They cause a warning, on the command line and in a file; with vLLM's default not even that."""
    plain = parse(["m"])
    assert parse(["m", "--swap-space", "4", "-pp", "1", "--enable-chunked-prefill", "--no-enable-lora"]) == plain
    assert caplog.messages == []
    given = "--swap-space 8 --disable-log-requests --no-enable-chunked-prefill -O3 --max-log-len 5 --api-server-count=4"
    assert parse([*given.split(), "m", "--disable-frontend-multiprocessing", "-cc", '{"mode": 3}']) == plain
    ignored = [message.partition(" is ignored: ")[0] for message in caplog.messages]
    expected = {word.partition("=")[0] for word in given.split() if word.startswith("--")}
    assert set(ignored) == expected | {
        "--optimization-level",
        "--disable-frontend-multiprocessing",
        "--compilation-config",
    }
    caplog.clear()
    path = tmp_path / "server.yaml"
    path.write_text("model: m\nswap-space: 8\nenable_prompt_tokens_details: true\n")
    assert parse(["--config", str(path)]) == plain
    assert len(caplog.messages) == 2


def test_every_flag_is_told_apart() -> None:
    """What changes nothing is in the tables of what there is not, which are no options of ours."""
    assert UNSUPPORTED.keys() >= CHANGE_NOTHING
    assert not UNSUPPORTED.keys() & {*OPTIONS, *SERVER_OPTIONS}
    for name in UNSUPPORTED.keys() - CHANGE_NOTHING:
        argument, flag = UNSUPPORTED[name], name.strip("_").replace("_", "-")
        asks = [["--" + flag, "x"]]
        if _is_switch(name, argument):
            asks = [[f"--{no}{flag}"] for no, value in (("", True), ("no-", False)) if argument.default is not value]
            asks = [] if argument.also else asks
        for given in asks:
            with pytest.raises(ValueError, match="is not supported: "):
                parse(["m", *given])


def test_numbers_as_vllm_writes_them() -> None:
    for text, number in (("64k", 64_000), ("64K", 65_536), ("1.5k", 1500), ("2M", 2 << 20), ("512", 512)):
        assert parse(["m", "--max-model-len", text])[0].max_model_len == number
    for text in ("1.5", "1.0001k", "k", "64q"):
        with pytest.raises(SystemExit):
            parse(["m", "--max-model-len", text])
    args, _ = parse(["m", "-tp", "1", "-q", "fp8"])
    assert (args.tensor_parallel_size, args.quantization) == (1, "fp8")


def test_help_shows_the_defaults_that_hold_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0 and said.startswith("usage: vllm-blend serve MODEL [options] ")
    assert "--enable-blending, --no-enable-blending reuse the KV of chunks at any position (default: True)" in said
    assert (
        "--max-logprobs N how many log-probabilities per token a request may ask for at most; -1 for no limit" in said
    )
    assert "(default: 20)" in said and "(default: None)" not in said and "(default: )" not in said


def test_config_file(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(
        "model: m\nport: 8001\nmax-model-len: 512\nserved_model_name: [a, b]\nenable-prefix-caching: false\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 3}\nuds: null\n"
    )
    args, options = parse(["--config", str(path), "--port", "8002"])
    assert (args.model, args.max_model_len, args.enable_prefix_caching) == ("m", 512, False)
    assert args.speculative_config == {"method": "ngram", "num_speculative_tokens": 3}
    assert (options.port, options.served_model_name, options.uds) == (8002, ["a", "b"], None)
    assert parse(["other", "--config", str(path)])[0].model == "other"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "there is no model"),
        (["m", "--max-model-length", "5"], "unknown option --max-model-length: did you mean --max-model-len?"),
        (["m", "--enable-lora"], "--enable-lora is not supported: merge the LoRA adapter"),
        (["m", "--lora-modules", "a=b"], "--lora-modules is not supported: merge the LoRA adapter"),
        (["m", "--lora-modules", "a=b", "c=d"], "--lora-modules is not supported: merge the LoRA adapter"),
        (["m", "--middleware", "a.b"], "--middleware is not supported: the server loads no middleware"),
        (["m", "-pp", "2"], "--pipeline-parallel-size is not supported: the model is shared by"),
        (["m", "--port", "70000"], "port=70000 is no TCP port"),
        (["m", "--ssl-keyfile", "key"], "ssl_keyfile and ssl_certfile belong together"),
        (["m", "--ssl-keyfile", "missing", "--ssl-certfile", "missing"], "ssl_certfile='missing' and ssl_keyfile"),
        (["m", "--config", "missing.yaml"], "config='missing.yaml' cannot be read"),
        (["/missing/model", "--port", "0"], "/missing/model"),
        (["m", "--otlp-traces-endpoint", "grpc://localhost:4317"], "is no HTTP URL: traces are sent by OTLP over HTTP"),
        (["m", "--api-keys", "missing", "--port", "0"], "api_keys: missing cannot be read"),
    ],
)
def test_bad_command_lines(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], restored_logging: None
) -> None:
    handler = Closing()
    assert main(arguments) == 2
    assert not handler.is_closed  # other libraries' handlers may close stderr with themselves
    assert message in capsys.readouterr().err


def test_a_bad_config_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.yaml"
    for text, message in (("prot: 1\n", "did you mean --port?"), ("- a\n", "must hold a mapping")):
        path.write_text(text)
        assert main(["m", "--config", str(path)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_loads_its_model(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_blend", "serve", REUSE_DEMO, "--uds", str(tmp_path / "socket")]
    environment, log = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}, tmp_path / "log"
    with log.open("w") as file, subprocess.Popen(command, stderr=file, cwd=ROOT, env=environment) as process:
        try:
            tasks = Path(f"/proc/{process.pid}/task")  # the child is one of a thread's
            wait_until(lambda: any((task / "children").read_text() for task in tasks.iterdir()))
            [child] = [int(each) for task in tasks.iterdir() for each in (task / "children").read_text().split()]
            process.send_signal(number)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
    assert not Path(f"/proc/{child}").exists()
    assert log.read_text().endswith(f"vllm-blend serve: ends, as it got {number.name}\n"), log.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["log"]  # the sockets' folders are gone


def test_sigterm_lets_a_stream_finish(tmp_path: Path) -> None:
    """A process of the command: what runs when the signal comes ends as it would have, new requests get 503, and when
    the last one has ended so does the process. What the chunk store still had to write is on the disk then."""
    template, log, path = tmp_path / "template.jinja", tmp_path / "log", tmp_path / "socket"
    template.write_text(TEMPLATE)
    options = {"--uds": path, "--device": "cpu", "--chat-template": template, "--num-gpu-blocks-override": 2048}
    keys, keys_end = os.pipe()  # as the shell's <(...) gives them: it can be read only once
    os.write(keys_end, b"alice secret\n")
    os.close(keys_end)
    options |= {
        "--chunk-store-path": tmp_path / "store",
        "--log-format": "json",
        "--shutdown-timeout": DEADLINE,
        "--api-keys": f"/dev/fd/{keys}",
    }
    arguments = [str(each) for pair in options.items() for each in pair]
    command = [sys.executable, "-m", "vllm_blend", "serve", REUSE_DEMO, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    body = {"messages": [USER], "max_tokens": 50, "ignore_eos": True, "stream": True}
    url = "/v1/chat/completions"
    with (
        log.open("w") as file,
        subprocess.Popen(command, stderr=file, cwd=ROOT, env=environment, pass_fds=(keys,)) as process,
    ):
        os.close(keys)
        try:
            wait_until(lambda: process.poll() is not None or "serving" in log.read_text())
            assert f"serving {REUSE_DEMO} at {path}" in log.read_text()
            transport, headers = httpx.HTTPTransport(uds=str(path)), {"Authorization": "Bearer secret"}
            with (
                httpx.Client(
                    transport=transport, base_url="http://server", timeout=DEADLINE, headers=headers
                ) as client,
                client.stream("POST", url, json=body | {"max_tokens": 900, "n": 64}) as long,
            ):
                kept = long.iter_lines()  # which would close the connection if it were dropped
                next(kept)
                with_passage = body | {
                    "documents": ["Tulmaris Works makes lenses. It was founded in Jorholm long ago."]
                }
                with client.stream("POST", url, json=with_passage, headers={"X-Request-Id": "mine"}) as answer:
                    assert answer.headers["x-request-id"] == "mine"
                    lines = answer.iter_lines()
                    next(lines)
                    process.send_signal(signal.SIGHUP)  # the pipe gives no keys a second time: they stay
                    wait_until(lambda: "the keys and the certificate stay as they are" in log.read_text())
                    assert client.get("/v1/models").status_code == 200
                    process.send_signal(signal.SIGTERM)
                    text = "\n".join(lines)
                assert '"finish_reason":"length"' in text and text.rstrip().endswith("[DONE]")
                for place, sent in ((url, body), ("/v1/chunks", {"text": "a"})):
                    late = client.post(place, json=sent)
                    assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
                    assert late.headers["x-request-id"]
                assert client.get("/health").status_code == 503
                assert process.poll() is None
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
    assert '"path": "/v1/chat/completions", "status": 200' in log.read_text()
    assert "draining" in log.read_text() and "Traceback" not in log.read_text()
    assert not path.exists()
    [index] = tmp_path.rglob("index.sqlite3")
    with closing(sqlite3.connect(index)) as connection:
        [stored] = connection.execute("SELECT count(*) FROM chunks").fetchone()
    assert stored >= 1
    lines_of = [json.loads(line) for line in log.read_text().splitlines()]  # of both processes, all in JSON
    [engine, served] = sorted((line for line in lines_of if "mine" in str(line.get("request_id"))), key=len)
    assert engine["process"] == "engine" and engine["request_id"].startswith("chatcmpl-mine-0-")
    assert engine["finish_reason"] == "length" and 0 <= engine["queue_seconds"] <= engine["seconds"]
    assert (served["request_id"], served["answer_id"], served["status"]) == ("mine", "chatcmpl-mine", 200)
    assert served["tenant"] == "alice" and "secret" not in log.read_text()
