"""Chunks that move between a GPU and pinned memory while decoding: copies on a stream of their own, and graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests import settings
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import demo_prompt, engine, feature, greedy, run
from tests.features.offload.placements import move_at_once
from tests.settings import Settings
from vllm_blend.features.offload.block_pool import HostBlockPool
from vllm_blend.features.offload.copies import StreamCopies
from vllm_blend.features.offload.extension import ChunkOffload
from vllm_blend.features.offload.promotion import ChunkScorer

pytestmark = pytest.mark.gpu

COMMON: dict[str, Any] = {  # many engines share the GPU, and pin memory of the host
    "device": "cuda",
    "enable_blending": True,
    "blend_chunk_cache_gib": 0.25,
    "max_num_seqs": 16,
    "num_gpu_blocks_override": 1024,
}
MOVING: dict[str, Any] = {"offload_host_gib": 0.25}


@pytest.fixture(params=["float32", "bfloat16"])
def on_gpu(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Arguments of engines on the GPU; outputs are compared by the rules of their dtype."""
    before = settings.current()
    settings.use(Settings("cuda", request.param))
    yield COMMON | {"dtype": request.param}
    settings.use(before)


def params() -> Any:
    return greedy(12, logprobs=5, ignore_eos=True)


def test_blocks_cross_the_link_and_come_back() -> None:
    key, value = (torch.randn(3, 9, 16, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    before = key.clone(), value.clone()
    host = HostBlockPool(64 << 20, 3, 16, 2, 64, torch.bfloat16, pinned=True)
    copies = StreamCopies(key, value, host)
    taken = host.allocate(3)
    assert taken is not None
    _wait(copies.submit([7, 2, 5], taken, True))
    _wait(copies.submit([1, 8, 3], taken, False))
    for tensor, old in zip((key, value), before, strict=True):
        assert torch.equal(tensor[:, [1, 8, 3]], old[:, [7, 2, 5]])
        assert torch.equal(tensor[:, [0, 2, 4, 5, 6, 7]], old[:, [0, 2, 4, 5, 6, 7]])


def _wait(ticket: Any) -> None:
    deadline = time.monotonic() + 10
    while not ticket.done() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert ticket.done()


@pytest.mark.parametrize(
    ("share", "predictor"),
    [(0.0, "retrieval_rank"), (0.5, "query_digest"), (1.0, "query_digest")],
)
def test_exact_mode_gives_the_answers_of_all_on_the_gpu(on_gpu: dict[str, Any], share: float, predictor: str) -> None:
    prompts = [demo_prompt(index, 6) for index in range(3)]
    with engine(**on_gpu) as llm:
        expected = run(llm, prompts, params())
        assert llm.llm_engine.model_executor.driver_worker.device.type == "cuda"
    moving = MOVING | {"offload_mode": "exact", "offload_device_fraction": share, "offload_predictor": predictor}
    with engine(**on_gpu, **moving) as llm:
        for left, right in zip(run(llm, prompts, params()), expected, strict=True):
            assert_same_logprobs(left, right)
        offload = feature(llm.llm_engine, ChunkOffload)
        assert (offload.scheduler.num_evictions > 0) == (share < 1)


@pytest.mark.parametrize("predictor", ["retrieval_rank", "query_digest"])
def test_resident_mode_is_the_same_with_and_without_graphs(
    on_gpu: dict[str, Any], predictor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is seen depends on when copies arrive, so all chunks are told to leave, and leave before the second step."""
    prompts = [demo_prompt(index, 6) for index in range(3)]
    moving = MOVING | {"offload_mode": "resident", "offload_predictor": predictor, "async_scheduling": False}
    outputs = []
    for eager in (False, True):
        with engine(**on_gpu, **moving, offload_resident_chunks=0, enforce_eager=eager) as llm:
            move_at_once(llm, monkeypatch)
            graphs = llm.llm_engine.model_executor.driver_worker.model_runner.block_pass.decode_graphs
            assert (graphs is None) is (eager or on_gpu["dtype"] not in _graph_dtypes())
            outputs.append(run(llm, prompts, params()))
            offload = feature(llm.llm_engine, ChunkOffload)
            assert offload is not None and offload.scheduler.num_evictions > 0
    for left, right in zip(*outputs, strict=True):
        assert_same_logprobs(left, right)


def _graph_dtypes() -> list[str]:
    """Return the dtypes for which a backend has decode graphs: plain torch, the only one for float32, has none."""
    return ["bfloat16"]


def test_chunks_that_move_leave_the_prompts_of_other_requests_alone(on_gpu: dict[str, Any]) -> None:
    """Blocks that leave are given to others at once: answers of a second batch are those of a fresh engine."""
    prompts = [demo_prompt(index, 6) for index in range(6)]
    with engine(**on_gpu) as llm:
        expected = run(llm, prompts, params())
    small = on_gpu | {"num_gpu_blocks_override": 200, "max_model_len": 1024}
    with engine(**small, **MOVING, offload_mode="exact", offload_predictor="query_digest") as llm:
        for batch in (prompts, prompts[::-1]):
            wanted = expected if batch is prompts else expected[::-1]
            for left, right in zip(run(llm, batch, params()), wanted, strict=True):
                assert_same_logprobs(left, right)


def test_memory_that_late_scores_read_is_not_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are computed on a stream of their own, perhaps after their request has ended and was forgotten."""
    score = ChunkScorer._score
    read: set[tuple[int, int]] = set()

    def late(scorer: ChunkScorer, residency: Any, memory: Any, *arguments: Any) -> None:
        torch.cuda._sleep(1_000_000_000)  # cycles: about half a second
        tensors = (memory.ranks, memory.resident, memory.digests.owner, memory.digests.centre, memory.digests.radius)
        read.clear()  # what the scores before this one read may be done with
        read.update((tensor.data_ptr(), tensor.nbytes) for tensor in tensors)
        score(scorer, residency, memory, *arguments)

    monkeypatch.setattr(ChunkScorer, "_score", late)
    with engine(**COMMON, **MOVING, dtype="bfloat16", offload_mode="resident") as llm:
        run(llm, [demo_prompt(0, 6)], params())
        offload = feature(llm.llm_engine, ChunkOffload)
        assert offload is not None and read and not offload.scorer._memory
        taken = [torch.empty(size, dtype=torch.uint8, device="cuda") for _, size in read for _ in range(2000)]
        stream = offload.scorer._stream
        assert stream is not None and not stream.query()  # they are still to be computed
        assert not {tensor.data_ptr() for tensor in taken} & {address for address, _ in read}
        torch.cuda.synchronize()
