"""Chunks from a disk on their way to a GPU: through its own memory, or through pinned memory of the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu.test_engine import MODEL, prompts
from vllm_blend import LLM, SamplingParams
from vllm_blend.kv_store.tiered import TieredChunkStore

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 4096, "max_num_seqs": 16, "blend_chunk_cache_gib": 0.25}


def store_of(llm: LLM) -> TieredChunkStore:
    store = llm.llm_engine.chunk_store
    assert store.below
    return store


@pytest.mark.parametrize("chunk_device", ["cuda", "cpu"])
def test_another_engine_answers_from_the_disk(tmp_path: Path, chunk_device: str) -> None:
    common = {"device": "cuda", "enable_blending": True, "enforce_eager": True, "blend_controller": True, **SMALL}
    common |= {"blend_chunk_device": chunk_device, "chunk_store_path": str(tmp_path)}
    answers = []
    for encodes in (True, False):
        llm = LLM(MODEL, **common)
        # An explicit ratio: the controller of an engine with pinned memory would choose one by its own measurements.
        asked = prompts(3, blend_recompute_ratio=0.15)
        answers.append([output.outputs[0].token_ids for output in llm.generate(asked, GREEDY, use_tqdm=False)])
        assert (llm.llm_engine.composer.num_encoded > 0) == encodes
        store = store_of(llm)
        assert store.flush(60)
        for name, value in store.gauges():
            if name == "disk_hits":
                assert (value > 0) != encodes
        assert len(store) > 0 and store.num_bytes <= store.budget_bytes
        controller = llm.llm_engine.controller
        assert controller is not None
        assert ("controller_memory_bytes_per_second" in dict(controller.gauges())) == (chunk_device == "cpu")
        store.close()
    assert answers[0] == answers[1]
