"""Two replicas on Ray Serve, with the demo model: what clients see, where requests go, and a replica that is killed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.util.placement_group import placement_group_table

from tests.checkout import ROOT
from tests.waiting import wait_until
from vllm_blend import LLM, SamplingParams
from vllm_blend.ray import build_app

MODEL = str(ROOT / "inputs" / "demo-model-reuse")
OPTIONS: dict[str, Any] = {
    "dtype": "float32",  # in its own processes, "auto" may be bfloat16
    "model": MODEL,
    "served_model_name": ["demo"],
    "num_cpus": 0.5,
    "ingress_cpus": 0.5,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 256,
    "shutdown_timeout": 5.0,
}
PASSAGES = [
    f"Town number {number} lies at the river and has {number + 3} bridges and a market. " for number in range(6)
]
PROCESS = "ray::ServeReplica:default:vllm-blend-engine"


@pytest.fixture(scope="module")
def client(serve_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    store = tmp_path_factory.mktemp("store")
    serve.run(build_app(OPTIONS | {"chunk_store_path": str(store)}, replicas=2))
    with httpx.Client(base_url=serve_url, timeout=300) as made:
        yield made
    serve.delete("default")  # if the last test has not done so


def chunked(*chunks: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prefix": "Read.\n", "chunks": list(chunks), "suffix": "Question: how many bridges?\nAnswer:"}
    return {"model": "demo", "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_answers_are_those_of_the_engine(client: httpx.Client) -> None:
    prompt = "Tulmaris Works makes"
    body = {"model": "demo", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    whole = client.post("/v1/completions", json=body)
    stream = client.post("/v1/completions", json=body | {"stream": True})
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [output] = LLM(MODEL, num_gpu_blocks_override=128).generate([prompt], params, use_tqdm=False)
    expected = output.outputs[0].text
    assert whole.json()["choices"][0]["text"] == expected
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert "".join(event["choices"][0]["text"] for event in events_of(stream)) == expected
    assert whole.headers["x-vllm-blend-replica"]


def test_other_endpoints_are_those_of_the_server(client: httpx.Client) -> None:
    assert client.get("/health").status_code == 200
    [card] = client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("demo", 1024)
    assert client.post("/tokenize", json={"model": "demo", "prompt": "a b"}).json()["count"] >= 2
    chat = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Where?"}],
        "max_tokens": 4,
        "documents": PASSAGES[:2],
    }
    assert client.post("/v1/chat/completions", json=chat).json()["usage"]["completion_tokens"] <= 4


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/v1/completions", {"model": "other", "prompt": "a"}, 404, "model_not_found"),
        ("/v1/completions", {"model": "demo", "prompt": "word " * 3000}, 400, None),
        ("/v1/chat/completions", {"model": "demo"}, 400, None),
        ("/v1/nothing", {}, 404, None),
    ],
)
def test_errors_are_those_of_the_server(
    client: httpx.Client, path: str, body: Any, status: int, code: str | None
) -> None:
    response = client.post(path, json=body, headers={"X-Request-Id": "given"})
    assert response.status_code == status and response.headers["x-request-id"] == "given"
    assert response.json()["error"]["message"] and (code is None or response.json()["error"]["code"] == code)


def test_a_request_goes_where_its_passages_are(client: httpx.Client) -> None:
    """One passage a request: without load, each has one home, in which it is found from the second time on."""
    homes: dict[str, set[str]] = {}
    for _ in range(3):
        for passage in PASSAGES:
            response = client.post("/v1/completions", json=chunked(passage))
            homes.setdefault(passage, set()).add(response.headers["x-vllm-blend-replica"])
            tiers = response.json()["usage"]["prompt_tokens_details"]["tiers"]
    assert all(len(each) == 1 for each in homes.values())
    assert tiers["device"] + tiers["host"] > 0 and tiers["disk"] == 0


def test_a_client_that_leaves_harms_no_other(client: httpx.Client) -> None:
    """Other tests see each link of what ends its request: the ingress cancels the stream (check_ingress.py), a closed
    stream is a disconnect (test_forwarding.py), and a server frees the pages (test_streams.py)."""
    with client.stream("POST", "/v1/completions", json=chunked(PASSAGES[0], stream=True, max_tokens=900)) as response:
        next(response.iter_lines())
    assert client.post("/v1/completions", json=chunked(PASSAGES[0])).status_code == 200


def test_a_killed_replica_costs_its_streams_only(client: httpx.Client) -> None:
    """Its stream ends by an error that says so; later requests are answered, and Ray Serve starts a new replica, which
    finds what the store has."""
    before = replicas()
    with client.stream("POST", "/v1/completions", json=chunked(PASSAGES[0], stream=True, max_tokens=900)) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(process_of(response.headers["x-vllm-blend-replica"]), signal.SIGKILL)
        rest = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert rest[-1] == "[DONE]" and json.loads(rest[-2])["error"]["code"] == "engine_unavailable"
    for passage in PASSAGES:
        assert client.post("/v1/completions", json=chunked(passage)).status_code == 200
    deadline = time.monotonic() + 300
    while len(set(replicas()) - {*before}) < 1 and time.monotonic() < deadline:
        time.sleep(1)
    names: set[str] = set()
    fresh = itertools.count()  # passages that no replica has seen, half of which belong to the new one
    while len(names) < 2 and time.monotonic() < deadline:
        found = [client.post("/v1/completions", json=chunked(passage)) for passage in PASSAGES]
        assert all(each.status_code == 200 for each in found)
        assert all(each.json()["usage"]["prompt_tokens_details"]["stored_tokens"] == 0 for each in found)
        found += [client.post("/v1/completions", json=chunked(f"Fresh passage {next(fresh)}. " * 4)) for _ in range(4)]
        names = {each.headers["x-vllm-blend-replica"] for each in found}
    assert len(names) == 2


def test_the_ranks_of_a_replica_are_in_its_group(client: httpx.Client) -> None:
    """A replica with rank 0, and an actor of Ray's with the other rank, answer as one rank does."""
    body = {"model": "demo", "prompt": "Tulmaris Works makes", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    expected = client.post("/v1/completions", json=body).json()["choices"]
    serve.delete("default")  # which no later test asks: both applications at once take 4.5 GiB
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "num_cpus": 0.25, "ingress_cpus": 0.25}
    serve.run(build_app(OPTIONS | ranks), name="ranks", route_prefix="/ranks")
    try:
        assert client.post("/ranks/v1/completions", json=body).json()["choices"] == expected
        assert [about["bundles"] for about in placement_groups()] == [{0: {"CPU": 0.25}, 1: {"CPU": 1.0}}]
    finally:
        serve.delete("ranks")
    wait_until(lambda: not placement_groups(), every=0.1)


def placement_groups() -> list[dict[str, Any]]:
    return [about for about in placement_group_table().values() if about["state"] != "REMOVED"]


def replicas() -> list[int]:
    """Return the processes of the engines' replicas."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_text().startswith(PROCESS):
                found.append(int(path.parent.name))
        except OSError:
            continue  # it has ended
    return found


def process_of(replica: str) -> int:
    """Return the process of the replica that has a name."""
    actors = ray._private.state.actors().values()
    [pid] = [each["Pid"] for each in actors if each["Name"].endswith(replica) and each["State"] == "ALIVE"]
    return int(pid)
