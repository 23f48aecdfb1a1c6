"""The device that an engine runs on, and the message if a GPU cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_blend import devices
from vllm_blend.config import SchedulerConfig
from vllm_blend.devices import resolve_device, resolve_dtype

TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040)."


@pytest.fixture
def old_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch with CUDA on a machine whose driver cannot serve it."""

    def init() -> None:
        raise RuntimeError(TOO_OLD)

    (tmp_path / "version").touch()
    monkeypatch.setattr(devices, "NVIDIA_DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    devices._warn_of_unusable_gpu.cache_clear()


def test_auto_falls_back_to_the_cpu_and_warns_once(old_driver: None, caplog: pytest.LogCaptureFixture) -> None:
    assert {resolve_device("auto").type for _ in range(3)} == {"cpu"}
    [record] = caplog.records
    assert record.levelname == "WARNING" and TOO_OLD in record.message


def test_a_forced_gpu_is_an_error_with_the_reason(old_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"device='cuda'.*driver on your system is too old.*use device='cpu'"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ValueError, match="built without CUDA"):
        resolve_device("cuda:0")


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [resolve_device(f"cuda{index}").index for index in ("", ":0", ":1")] == [None, 0, 1]
    with pytest.raises(ValueError, match=r"device='cuda:2': torch sees 2 CUDA devices, counted from 0"):
        resolve_device("cuda:2")


def test_nothing_is_said_where_there_is_no_gpu_to_expect(
    old_driver: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resolve_device("auto").type == "cpu"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(devices, "NVIDIA_DRIVER", Path("/nowhere"))
    assert resolve_device("auto").type == "cpu"
    assert caplog.records == []


def test_the_tokens_of_a_step() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert [SchedulerConfig().step_tokens(device) for device in (cpu, gpu)] == [2048, 8192]
    assert SchedulerConfig(max_num_seqs=4000).step_tokens(cpu) == 4000
    assert SchedulerConfig(max_num_batched_tokens=300).step_tokens(gpu) == 300


@pytest.mark.parametrize(
    ("fast", "checkpoint", "expected"),
    [
        (True, torch.bfloat16, torch.bfloat16),
        (True, torch.float16, torch.bfloat16),
        (True, torch.float32, torch.float32),
        (True, None, torch.float32),
        (False, torch.bfloat16, torch.float32),
        (False, torch.float16, torch.float32),
    ],
)
def test_auto_on_a_cpu_is_bfloat16_where_it_is_fast(
    fast: bool, checkpoint: torch.dtype | None, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda: fast)
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", checkpoint, cpu) == expected
    assert resolve_dtype("float32", checkpoint, cpu) == torch.float32
    assert resolve_dtype("float16", checkpoint, cpu) == torch.float16
