"""Sharing out the memory of a GPU, in numbers, and the error when something does not fit."""

from __future__ import annotations

import gc
import traceback
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.worker import memory
from vllm_blend.worker.kv_cache import CacheShape, KVCache
from vllm_blend.worker.memory import GIB, GRANULARITY, OutOfDeviceMemory, Pool, Share, Usage, must_fit

H200 = Share(
    total=140 * GIB,
    utilization=0.9,
    other=GIB // 2,
    weights=14 * GIB,
    activations=GIB,
    graphs=GIB // 4,
    chunk_store=4 * GIB,
)
BLOCK = 2 * GIB // 1024  # 16 tokens of a 7B model
CPU = torch.device("cpu")


def test_the_pool_is_what_is_left_of_the_share() -> None:
    assert H200.pool == 126 * GIB - (GIB // 2 + 14 * GIB + GIB + GIB // 4 + 4 * GIB)
    assert H200.num_blocks(BLOCK) == H200.pool // BLOCK == 54400


@given(
    total=st.integers(1, 200 * GIB),
    utilization=st.floats(0.01, 1.0),
    weights=st.integers(0, 100 * GIB),
    block_bytes=st.sampled_from([2 << 10, 96 << 10, 1 << 20, 2 << 20, 5 << 20]),
)
def test_blocks_fill_the_pool_and_never_more(total: int, utilization: float, weights: int, block_bytes: int) -> None:
    share = Share(total, utilization, other=12345, weights=weights, activations=678, graphs=9, chunk_store=0)
    blocks = share.num_blocks(block_bytes)
    if share.pool < 2 * GRANULARITY:
        assert blocks == 0
    else:
        each = -(-blocks * block_bytes // 2 // GRANULARITY) * GRANULARITY  # what the device gives for K, and for V
        assert 2 * each <= share.pool
        assert share.pool - blocks * block_bytes < block_bytes + 2 * GRANULARITY


def test_a_share_and_a_pool_in_words() -> None:
    assert str(H200) == (
        "0.9 of 140.00 GiB is 126.00: weights 14.00, activations 1.00, CUDA graphs 0.25, chunk store 4.00, "
        "other 0.50 GiB"
    )
    pool = Pool(num_blocks=4097, block_size=16, block_bytes=BLOCK, max_model_len=32768)
    assert (pool.num_tokens, pool.concurrency) == (65536, 2.0)
    assert str(pool) == (
        "KV cache 8.00 GiB: 4097 blocks, 65536 tokens of 131072 bytes, 2.0 requests of max_model_len=32768 at once"
    )
    assert Pool(4, 16, BLOCK, max_model_len=17).concurrency == 1.5  # a request takes whole blocks


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 8 GiB."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_what_did_not_fit_is_named_with_the_remedy(error: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = Usage(total=8 * GIB, used=7 * GIB, reserved=5 * GIB, allocated=4 * GIB)
    monkeypatch.setattr(Usage, "now", classmethod(lambda cls, device: usage))
    with pytest.raises(OutOfDeviceMemory) as caught, must_fit("the weights", "use fewer", torch.device("cuda")):
        raise error
    assert caught.value.__cause__ is error
    said = str(error).partition(". GPU")[0]
    assert str(caught.value) == (
        "the weights did not fit into GPU memory (of 8.00 GiB, this process's tensors hold 4.00 GiB, other processes "
        f"and CUDA itself 2.00 GiB): use fewer ({said})"
    )


def test_what_does_not_fit_into_the_hosts_memory_is_named() -> None:
    """More than any machine can address, so nothing is touched before the error."""
    message = r"^the KV cache did not fit into memory: use fewer \(Unable to allocate"
    with pytest.raises(OutOfDeviceMemory, match=message), must_fit("the KV cache", "use fewer", CPU):
        KVCache.allocate(CacheShape(8, 8, 128, torch.float32), 2**40, 128, CPU)


def test_other_errors_pass_and_success_is_silent() -> None:
    with pytest.raises(RuntimeError, match=r"^size mismatch$"), must_fit("the weights", "use fewer", CPU):
        raise RuntimeError("size mismatch")
    with must_fit("the weights", "use fewer", CPU):
        pass


def test_what_was_loaded_so_far_is_let_go() -> None:
    """A caller that catches the error, and keeps it, can try again with less."""
    held: list[weakref.ref[torch.Tensor]] = []

    def load() -> None:
        weights = torch.zeros(10)
        held.append(weakref.ref(weights))
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    with pytest.raises(OutOfDeviceMemory) as caught, must_fit("the weights", "use fewer", CPU):
        load()
    gc.collect()
    assert held[0]() is None
    assert "in load" in "".join(traceback.format_exception(caught.value))  # where it happened is still told


def test_usage_tells_tensors_from_the_rest() -> None:
    assert memory.Usage(total=10, used=7, reserved=4, allocated=3).other == 3
