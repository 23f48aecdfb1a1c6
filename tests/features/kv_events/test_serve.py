"""`vllm-blend serve` with KV events: its engine process publishes, until SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.engines import ROOT
from tests.entrypoints.openai.servers import REUSE_DEMO
from tests.features.kv_events.subscriber import Index, subscribed
from tests.waiting import DEADLINE, wait_until

pytestmark = [pytest.mark.cpu_only, pytest.mark.slow]


def test_a_server_publishes_what_a_router_needs(tmp_path: Path) -> None:
    events, replay = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"
    config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay, "topic": "kv@pod@demo"}
    options = {"--uds": tmp_path / "socket", "--device": "cpu", "--num-gpu-blocks-override": 256, "--block-size": 8}
    options["--kv-events-config"] = json.dumps(config)
    arguments = [str(each) for pair in options.items() for each in pair]
    command = [sys.executable, "-m", "vllm_blend", "serve", REUSE_DEMO, *arguments]
    environment, log = os.environ | {"OMP_NUM_THREADS": "1"}, tmp_path / "log"
    prompt = list(range(5, 45))
    with (
        log.open("w") as file,
        subprocess.Popen(command, stderr=file, cwd=ROOT, env=environment) as process,
    ):
        try:
            wait_until(lambda: process.poll() is not None or "serving" in log.read_text())
            assert process.poll() is None, log.read_text()
            transport = httpx.HTTPTransport(uds=str(tmp_path / "socket"))
            with (
                subscribed(events, replay, "kv@pod") as subscriber,
                httpx.Client(transport=transport, base_url="http://server", timeout=DEADLINE) as client,
            ):
                body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
                assert client.post("/v1/completions", json=body).status_code == 200
                index = Index()
                for _, batch in subscriber.replay(0):
                    index.apply(batch)
                assert index.num_cached(prompt, 8) == 40
                used = client.post("/v1/completions", json=body).json()["usage"]
                assert used["prompt_tokens_details"]["cached_tokens"] == 32  # the last token is always computed
                families = text_string_to_metric_families(client.get("/metrics").text)
                told = {sample.name: sample.value for each in families for sample in each.samples}
                assert told["vllm_blend:kv_event_batches_total"] == 1
                assert told["vllm_blend:kv_event_batches_dropped_total"] == 0
            process.send_signal(signal.SIGTERM)
            assert process.wait(DEADLINE) == 0
        finally:
            process.kill()
    assert f"KV events are published at {events}, and replayed at {replay}" in log.read_text()
    assert "Traceback" not in log.read_text()
