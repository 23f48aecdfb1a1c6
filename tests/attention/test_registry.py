"""Backends that work are found, 'auto' takes the right one, and users are told why. Packages and backends are fakes."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_blend.attention import flashinfer, registry
from vllm_blend.attention.metadata import AttentionBackend
from vllm_blend.attention.registry import KINDS, Kind, Unusable, first_usable, make_backend, make_usable
from vllm_blend.attention.self_check import HeadLayout
from vllm_blend.attention.torch_native import TorchNativeBackend

CPU = torch.device("cpu")
LAYOUT = HeadLayout(CPU, torch.float32, 4, 2, 64)


class BrokenImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A package that is found, and raises when it is imported."""

    def __init__(self, name: str, error: BaseException) -> None:
        self.name, self.error = name, error

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname == self.name else None

    def exec_module(self, module: types.ModuleType) -> None:
        raise self.error


class FakeWrapper:
    """FlashInfer's wrappers, as a package that imports and then does whatever `behaviour` says."""

    @staticmethod
    def behaviour(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError

    def __init__(self, *arguments: Any, **options: Any) -> None: ...

    def plan(self, *arguments: Any, **options: Any) -> None: ...

    def run(self, q: torch.Tensor, cache: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        return FakeWrapper.behaviour(q, out)


def install_fake(monkeypatch: pytest.MonkeyPatch, behaviour: Any) -> None:
    package = types.ModuleType("flashinfer")
    package.BatchPrefillWithPagedKVCacheWrapper = FakeWrapper  # type: ignore[attr-defined]
    package.BatchDecodeWithPagedKVCacheWrapper = FakeWrapper  # type: ignore[attr-defined]
    monkeypatch.setattr(FakeWrapper, "behaviour", staticmethod(behaviour))
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    monkeypatch.setitem(sys.modules, "flashinfer", package)


def break_import(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [BrokenImport(name, error), *sys.meta_path])


def lack(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)  # importing it is a ModuleNotFoundError that names it


def fit_the_cpu(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these backends be tried here, where their libraries have nothing to run on."""
    for name in names:
        monkeypatch.setitem(KINDS, name, replace(KINDS[name], unfit=lambda layout: None))


def misses(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("the kernel failed\n  inputs: many\n  no kernel image is available\n")


def lies(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros_like(q) if out is None else out.zero_()


class TestUsable:
    @pytest.mark.parametrize("name", ["flashinfer", "xformers"])
    def test_missing(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        lack(monkeypatch, name)
        with pytest.raises(Unusable, match=f"{name} is not installed") as caught:
            make_usable(name, LAYOUT)
        assert caught.value.missing

    @pytest.mark.parametrize(
        "error",
        [
            OSError("libcudart.so.12: cannot open shared object file"),
            ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi"),  # a part of it is missing, not it
            AttributeError("module 'torch' has no attribute 'old'"),
            SystemExit("needs a newer Python"),
        ],
        ids=lambda error: type(error).__name__,
    )
    @pytest.mark.parametrize("name", ["flashinfer", "xformers"])
    def test_raises_on_import(self, name: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
        break_import(monkeypatch, name, error)
        with pytest.raises(Unusable, match=f"{name} does not work here: {type(error).__name__}: ") as caught:
            make_usable(name, LAYOUT)
        assert not caught.value.missing and str(error) in str(caught.value)

    def test_imports_and_fails_to_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install_fake(monkeypatch, misses)
        with pytest.raises(
            Unusable, match=r"does not work here: RuntimeError: the kernel failed \.\.\. no kernel image is available$"
        ):
            make_usable("flashinfer", LAYOUT)

    def test_runs_and_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install_fake(monkeypatch, lies)
        with pytest.raises(Unusable, match="computes something else than plain torch"):
            make_usable("flashinfer", LAYOUT)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["cpu", "torch_native"])
    def test_what_works_is_returned(self, name: str, dtype: torch.dtype) -> None:
        assert make_usable(name, replace(LAYOUT, dtype=dtype)).name == name


class TestForced:
    @pytest.mark.parametrize("name", ["cuda", "flashinfer", "xformers"])
    def test_a_backend_of_gpus_on_a_cpu(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"attention_backend='{name}' cannot serve this: it does not run on cpu"):
            make_backend(name, CPU, torch.float32, 64)

    @pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.takes_sinks])
    def test_a_backend_without_sinks(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(KINDS, name, replace(KINDS[name], unfit=lambda layout: None))
        with pytest.raises(ValueError, match=f"'{name}' cannot serve this: it knows no attention sinks"):
            make_backend(name, CPU, torch.float32, 64, sinks=True)

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fit_the_cpu(monkeypatch, "flashinfer")
        lack(monkeypatch, "flashinfer")
        with pytest.raises(ImportError, match=r"flashinfer is not installed.*install flashinfer-python.*'auto'"):
            make_backend("flashinfer", CPU, torch.float32, 64)

    def test_installed_but_broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fit_the_cpu(monkeypatch, "xformers")
        break_import(monkeypatch, "xformers", OSError("undefined symbol"))
        with pytest.raises(RuntimeError, match=r"undefined symbol.*install an xformers that was built for this torch"):
            make_backend("xformers", CPU, torch.float32, 64)


class Named(TorchNativeBackend):
    """Plain torch under another name."""

    def __init__(self, name: str) -> None:
        self.name = name


def kind(backend: AttentionBackend) -> Kind:
    return Kind(lambda layout: backend, lambda layout: None, fix="")


@pytest.fixture(autouse=True)
def forget_what_was_found() -> Iterator[None]:
    first_usable.cache_clear()
    yield
    first_usable.cache_clear()


class TestAuto:
    def test_our_kernels_come_first(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            assert make_backend("auto", CPU, torch.float32, 64).name == "cpu"
        assert not caplog.records

    def test_the_first_that_works_is_taken_and_the_log_says_why_not_ours(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(KINDS, "cpu", replace(KINDS["cpu"], unfit=lambda layout: "it is off"))
        monkeypatch.setitem(KINDS, "flashinfer", kind(Named("next")))
        with caplog.at_level(logging.INFO):
            assert make_backend("auto", CPU, torch.float32, 64).name == "next"
        assert [r.getMessage() for r in caplog.records] == ["attention runs without our kernels: it is off"]

    def test_looking_again_costs_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert first_usable(LAYOUT) == "cpu"
        monkeypatch.setattr(registry, "make_usable", lambda *_: pytest.fail("looked again"))
        assert first_usable(LAYOUT) == "cpu"

    def test_without_any_of_them_plain_torch_runs(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(KINDS, "cpu", replace(KINDS["cpu"], unfit=lambda layout: "it is off"))
        with caplog.at_level(logging.INFO):
            assert make_backend("auto", CPU, torch.float32, 64).name == "torch_native"
        assert [r.getMessage() for r in caplog.records] == ["attention runs in plain torch: it is off"]

    @pytest.mark.parametrize("missing", [True, False])
    def test_what_is_broken_or_missing_is_left_out_with_a_line(
        self, missing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setitem(KINDS, "cpu", replace(KINDS["cpu"], unfit=lambda layout: "it is off"))
        fit_the_cpu(monkeypatch, "flashinfer")
        if missing:
            lack(monkeypatch, "flashinfer")
        else:
            break_import(monkeypatch, "flashinfer", OSError("libcudart.so.12"))
        with caplog.at_level(logging.INFO):
            assert make_backend("auto", CPU, torch.float32, 64).name == "torch_native"
        [(level, line)] = [(r.levelname, r.getMessage()) for r in caplog.records if "left out" in r.getMessage()]
        if missing:
            assert (level, line) == ("INFO", "attention backend flashinfer is left out: flashinfer is not installed")
        else:
            assert level == "WARNING"
            assert "flashinfer is left out: flashinfer does not work here: OSError: libcudart.so.12" in line


def test_an_fp8_cache_rules_out_backends_that_do_not_read_one(caplog: pytest.LogCaptureFixture) -> None:
    fp8 = replace(LAYOUT, fp8_cache=True)
    assert {name for name in KINDS if KINDS[name].takes_fp8_cache} == {"cpu", "cuda", "torch_native"}
    for name in ("cpu", "torch_native"):
        make_usable(name, fp8)
    with pytest.raises(ValueError, match="attention_backend='xformers' cannot serve this: it does not run on cpu"):
        make_backend("xformers", CPU, torch.float32, 64, 4, 2, fp8_cache=True)
    for name in ("flashinfer", "xformers"):
        unfit = registry._unfit(replace(KINDS[name], unfit=lambda layout: None), fp8)
        assert unfit == "it reads no FP8 KV cache"
    first_usable.cache_clear()
    assert first_usable(fp8) == "cpu"
