from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ops.paged import ISAS
from vllm_blend import ops
from vllm_blend.ops import bindings
from vllm_blend.ops.activation import silu_and_mul_reference


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    bindings.reload()
    yield
    bindings.reload()


def test_every_machine_has_the_generic_kernels_last() -> None:
    assert ISAS[-1] == "generic"
    assert len(set(ISAS)) == len(ISAS)


def test_the_best_instruction_set_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bindings.ISA_VARIABLE, raising=False)
    monkeypatch.delenv(bindings.DISABLE_VARIABLE, raising=False)
    assert bindings.cpu_kernels().isa == ISAS[0]
    assert bindings.kernels_for(torch.zeros(1)) is not None


def test_unknown_instruction_set_is_an_error_that_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bindings.ISA_VARIABLE, "mmx")
    with pytest.raises(ValueError, match=r"mmx.*generic"):
        bindings.cpu_kernels()


def test_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bindings.DISABLE_VARIABLE, "1")
    assert bindings.kernels_for(torch.zeros(1)) is None
    with pytest.raises(bindings.KernelsUnavailable, match=bindings.DISABLE_VARIABLE):
        bindings.cpu_kernels()
    x = torch.randn(3, 8)
    assert bindings.kernels_for(x) is None
    assert torch.equal(ops.silu_and_mul(x), silu_and_mul_reference(x))


def test_missing_library_runs_the_twins_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(bindings.DISABLE_VARIABLE, raising=False)
    monkeypatch.setattr(bindings, "LIBRARY", tmp_path / "absent.so")
    with caplog.at_level(logging.WARNING):
        x = torch.randn(3, 8)
        assert torch.equal(ops.silu_and_mul(x), silu_and_mul_reference(x))
        ops.silu_and_mul(x)
        assert bindings.kernels_for(torch.zeros(1)) is None
    warnings = [record for record in caplog.records if record.name == bindings.logger.name]
    assert len(warnings) == 1
    assert "build_ext" in warnings[0].getMessage()
    with pytest.raises(ImportError, match="not built"):
        bindings.cpu_kernels()


def test_broken_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(bindings.DISABLE_VARIABLE, raising=False)
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(bindings, "LIBRARY", broken)
    with pytest.raises(bindings.KernelsUnavailable, match="do not load"):
        bindings.cpu_kernels()


def test_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bindings.DISABLE_VARIABLE, raising=False)
    monkeypatch.setattr(bindings, "ABI_VERSION", -1)
    with pytest.raises(bindings.KernelsUnavailable, match="ABI"):
        bindings.cpu_kernels()


def test_kernels_leave_autograd_and_other_dtypes_to_torch() -> None:
    assert bindings.kernels_for(torch.randn(3, 8)) is not None
    assert bindings.kernels_for(torch.randn(3, 8, requires_grad=True)) is None
    assert bindings.kernels_for(torch.randn(3, 8, dtype=torch.float64)) is None


def test_importing_ops_loads_no_library() -> None:
    code = "import vllm_blend.ops.bindings as b, vllm_blend.ops; assert b._library.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", code], check=True)
