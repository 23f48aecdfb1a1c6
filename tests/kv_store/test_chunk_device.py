"""The device of chunk KV: the setting, and what it means on each device."""

from __future__ import annotations

import pytest
import torch

from tests.engine.engines import tiny_model
from vllm_blend import LLM
from vllm_blend.config import BlendConfig
from vllm_blend.kv_store import host_memory

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


def test_auto_is_the_device_of_the_engine() -> None:
    assert BlendConfig().resolve_chunk_device(CPU) == CPU
    assert BlendConfig().resolve_chunk_device(CUDA) == CUDA


def test_chunks_of_a_gpu_engine_may_live_on_either_side() -> None:
    assert BlendConfig(chunk_device="cpu").resolve_chunk_device(CUDA) == CPU
    assert BlendConfig(chunk_device="cuda").resolve_chunk_device(CUDA) == CUDA
    assert BlendConfig(chunk_device="cpu").resolve_chunk_device(CPU) == CPU


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"chunk_device='disk' is unknown: .*'auto', 'cpu', 'cuda'"):
        BlendConfig(chunk_device="disk")  # type: ignore[arg-type]


def test_a_cpu_engine_has_no_gpu_for_its_chunks() -> None:
    with pytest.raises(ValueError, match=r"blend_chunk_device='cuda', but the engine runs on the cpu"):
        LLM(tiny_model("llama"), device="cpu", enable_blending=True, blend_chunk_device="cuda")


def test_pinning_more_than_there_is_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3 << 30)
    with pytest.raises(ValueError, match=r"8\.0 GiB .* 3\.0 GiB .*lower blend_chunk_cache_gib"):
        host_memory.pinned_buffer(8 << 30, "blend_chunk_cache_gib")


def test_the_available_memory_is_known_on_linux() -> None:
    available = host_memory.available_bytes()
    assert available is None or available > 1 << 20
