"""Which backends work, which 'auto' takes, and what a user is told. Packages and backends are fakes here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import logging
import sys
import types
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_blend.attention import choice, flashinfer, kinds, measure
from vllm_blend.attention.choice import Choice, Timing, choose, fastest_of
from vllm_blend.attention.hybrid import HybridBackend
from vllm_blend.attention.kinds import KINDS, Kind, Unusable, usable
from vllm_blend.attention.measure import DECODE, DENSE, JOBS, SCATTERED, HeadLayout, Workload
from vllm_blend.attention.metadata import AttentionBackend
from vllm_blend.attention.registry import make_backend
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

    behaviour: Any = None

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
            usable(name, LAYOUT)
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
            usable(name, LAYOUT)
        assert not caught.value.missing and str(error) in str(caught.value)

    def test_imports_and_fails_to_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install_fake(monkeypatch, misses)
        with pytest.raises(
            Unusable, match=r"does not work here: RuntimeError: the kernel failed \.\.\. no kernel image is available$"
        ):
            usable("flashinfer", LAYOUT)

    def test_runs_and_is_wrong(self, monkeypatch: pytest.MonkeyPatch) -> None:
        install_fake(monkeypatch, lies)
        with pytest.raises(Unusable, match="computes something else than plain torch"):
            usable("flashinfer", LAYOUT)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", ["cpu", "torch_native"])
    def test_what_works_is_returned(self, name: str, dtype: torch.dtype) -> None:
        assert usable(name, replace(LAYOUT, dtype=dtype)).name == name


class TestForced:
    @pytest.mark.parametrize("name", ["cuda", "flashinfer", "xformers"])
    def test_a_backend_of_gpus_on_a_cpu(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"attention_backend='{name}' cannot serve this: it does not run on cpu"):
            make_backend(name, CPU, torch.float32, 64)

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


class Paced(TorchNativeBackend):
    """Plain torch under another name; how fast it is says a table."""

    def __init__(self, name: str, capturable: bool = False) -> None:
        self.name, self.capturable_decode = name, capturable


def kind(backend: AttentionBackend) -> Kind:
    return Kind(lambda layout: backend, lambda layout: None, fix="")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, bool]]]:
    """Times come from FIGURES, and what was asked for is written down."""
    asked: list[tuple[str, str, bool]] = []

    def milliseconds(self: Workload, backend: AttentionBackend, job: str, captured: bool = False) -> float:
        asked.append((backend.name, job, captured))
        figure = FIGURES[backend.name][JOBS.index(job)]
        if figure is None:
            raise RuntimeError("out of memory")
        return figure

    monkeypatch.setattr(Workload, "milliseconds", milliseconds)
    monkeypatch.setattr(choice, "_has_vector_kernels", lambda: False)
    choose.cache_clear()
    yield asked
    choose.cache_clear()


FIGURES: dict[str, Sequence[float | None]] = {
    "ours": (1.0, 1.0, 1.0),
    "quick": (0.5, 2.0, 0.5),
    "level": (0.96, 0.96, 0.96),
    "failing": (0.1, None, 0.1),
    "torch_native": (3.0, 3.0, 3.0),
}


def use_kinds(monkeypatch: pytest.MonkeyPatch, **found: Kind) -> None:
    for module in (kinds, choice):
        monkeypatch.setattr(module, "KINDS", {**found, "torch_native": KINDS["torch_native"]})
    monkeypatch.setattr(choice, "OURS", ("ours",))


class TestAuto:
    def test_each_job_gets_the_fastest(
        self, measured: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        ours, quick = Paced("ours"), Paced("quick")
        use_kinds(monkeypatch, ours=kind(ours), quick=kind(quick))
        with caplog.at_level(logging.INFO):
            assert choose(LAYOUT, False) == Choice("quick", "ours", "quick", "ours")
        [line] = [record.getMessage() for record in caplog.records]
        assert "dense prefill: quick (quick 0.500, ours 1.000, torch_native 3.000)" in line
        assert "scattered prefill: ours (ours 1.000, quick 2.000" in line
        hybrid = choose(LAYOUT, False).make(LAYOUT)
        assert isinstance(hybrid, HybridBackend) and hybrid.dense is quick and hybrid.mass is ours

    def test_a_process_measures_once(self, measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        use_kinds(monkeypatch, ours=kind(Paced("ours")))
        choose(LAYOUT, False)
        count = len(measured)
        assert choose(LAYOUT, False).make(LAYOUT).name == "ours" and len(measured) == count == 2 * len(JOBS)
        choose(replace(LAYOUT, num_heads=8), False)
        assert len(measured) == 2 * count

    def test_alone_there_is_nothing_to_measure(
        self, measured: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        use_kinds(monkeypatch)
        monkeypatch.setitem(choice.KINDS, "cpu", replace(KINDS["cpu"], unfit=lambda layout: "it is off"))
        with caplog.at_level(logging.INFO):
            assert choose(LAYOUT, False).make(LAYOUT).name == "torch_native"
        assert measured == []
        assert [r.getMessage() for r in caplog.records] == ["attention runs in plain torch: it is off"]

    def test_what_is_broken_or_missing_is_left_out_with_a_line(
        self, measured: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        fit_the_cpu(monkeypatch, "flashinfer", "xformers")
        use_kinds(monkeypatch, ours=kind(Paced("ours")), flashinfer=KINDS["flashinfer"], xformers=KINDS["xformers"])
        lack(monkeypatch, "flashinfer")
        break_import(monkeypatch, "xformers", OSError("libcudart.so.12"))
        with caplog.at_level(logging.INFO):
            assert choose(LAYOUT, False).make(LAYOUT).name == "ours"
        lines = {r.levelname: r.getMessage() for r in caplog.records if "left out" in r.getMessage()}
        assert lines["INFO"] == "attention backend flashinfer is left out: flashinfer is not installed"
        assert "xformers is left out: xformers does not work here: OSError: libcudart.so.12" in lines["WARNING"]

    def test_what_fails_when_timed_is_left_out(
        self, measured: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        use_kinds(monkeypatch, ours=kind(Paced("ours")), failing=kind(Paced("failing")))
        with caplog.at_level(logging.WARNING):
            assert choose(LAYOUT, False).make(LAYOUT).name == "ours"
        assert "failing is left out: it fails when timed: RuntimeError: out of memory" in caplog.text

    def test_decoding_prefers_what_graphs_can_hold(self, measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        use_kinds(monkeypatch, ours=kind(Paced("ours", capturable=True)), quick=kind(Paced("quick")))
        assert choose(LAYOUT, True) == Choice("quick", "ours", "ours", "ours")
        assert [asked for asked in measured if asked[2]] == [("ours", DECODE, True)]
        assert choose(LAYOUT, False).decode == "quick"

    def test_on_a_cpu_with_vector_kernels_nothing_is_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(choice, "_has_vector_kernels", lambda: True)
        monkeypatch.setattr(Workload, "make", lambda layout: pytest.fail("measured"))
        choose.cache_clear()
        assert make_backend("auto", CPU, torch.float32, 64).name == "cpu"
        choose.cache_clear()


def test_ties_go_to_the_first() -> None:
    timings = {name: Timing(False, dict(zip(JOBS, FIGURES[name], strict=True))) for name in ("ours", "level", "quick")}  # type: ignore[arg-type]
    assert fastest_of(timings, SCATTERED, captured=False) == "ours"
    assert fastest_of(timings, DENSE, captured=False) == "quick"
    assert fastest_of(timings, DECODE, captured=True) == "quick"  # nothing can be captured: the fastest then


def test_times_are_measured() -> None:
    workload = Workload.make(LAYOUT)
    assert set(workload.steps) == set(JOBS)
    assert all(workload.milliseconds(make_backend("cpu", CPU, torch.float32, 64), job) > 0 for job in JOBS)


def test_times_are_milliseconds_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of which a forward pass takes two seconds, and now and then four."""
    ticks = itertools.chain.from_iterable((10 * n, 10 * n + (2 if n % 3 else 4)) for n in itertools.count())
    monkeypatch.setattr(measure, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks)))
    monkeypatch.setattr(measure, "BUDGET_S", 20)
    workload = Workload.make(LAYOUT)
    for job in JOBS:
        taken = workload.milliseconds(make_backend("cpu", CPU, torch.float32, 64), job)
        assert taken == pytest.approx(2000 / workload.layers)
