"""The seed pipeline's facade: a store, a scheduler, and a clear word where kernels are missing."""

from __future__ import annotations

import pytest
import torch

from tests.engine.engines import demo_prompt, engine, feature, greedy, run
from vllm_blend import KVCacheManager
from vllm_blend.features.offload.extension import ChunkOffload
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.ops import bindings

pytestmark = pytest.mark.cpu_only


def test_it_keeps_chunks() -> None:
    manager = KVCacheManager(require_kernels=False, budget_gib=1.0)
    kv = ChunkKV(torch.ones(2, 3, 1, 4), torch.zeros(2, 3, 1, 4))
    manager.put("a", kv)
    assert "a" in manager and manager.get("a") is kv and manager.get("b") is None
    assert manager.stats() == {"chunks": 1, "bytes": kv.nbytes, "promotions": 0, "evictions": 0, "bytes_moved": 0}
    manager.remove("a")
    assert len(manager) == 0


def test_it_speaks_for_an_engine() -> None:
    with engine(enable_blending=True, block_size=8, offload_mode="exact") as llm:
        inner = llm.llm_engine
        manager = KVCacheManager(store=inner.chunk_store, scheduler=feature(inner, ChunkOffload).scheduler)
        before = manager.stats()
        run(llm, demo_prompt(0, 4), greedy(4, ignore_eos=True))
        after = manager.stats()
        assert after["chunks"] == len(inner.chunk_store) == 5 and after["evictions"] >= before["evictions"] + 3
        assert after["bytes_moved"] > before["bytes_moved"]


def test_missing_kernels_are_an_error_only_where_they_are_required(monkeypatch: pytest.MonkeyPatch) -> None:
    KVCacheManager(require_kernels=bindings.kernels_for(torch.zeros(1)) is not None)
    monkeypatch.setenv(bindings.DISABLE_VARIABLE, "1")
    bindings.reload()
    try:
        with pytest.raises(bindings.KernelsUnavailable, match="switched off"):
            KVCacheManager(require_kernels=True)
        KVCacheManager(require_kernels=False)
    finally:
        monkeypatch.undo()
        bindings.reload()
