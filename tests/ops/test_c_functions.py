"""What is declared of the kernels' C functions: it is what the headers say, and pointers cannot be swapped."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from vllm_blend.features.kv_compress.cuda_ops import SumsFunctions
from vllm_blend.ops.bindings import CPUKernels
from vllm_blend.ops.c_functions import c_type, prototypes
from vllm_blend.ops.cuda import CUDAFunctions
from vllm_blend.ops.cuda_all_reduce import AllReduceFunctions
from vllm_blend.ops.cuda_attention import AttentionFunctions, Decode, Prefill
from vllm_blend.ops.cuda_library import CacheView, VariantFunctions
from vllm_blend.ops.cuda_sampling import SamplingArguments, SamplingFunctions

CPU_HEADER = ROOT / "csrc" / "vllm_blend_cpu.h"
CUDA_HEADER = ROOT / "csrc" / "cuda" / "kernels.h"
CUDA_PROTOCOLS = (
    AllReduceFunctions,
    AttentionFunctions,
    CUDAFunctions,
    SamplingFunctions,
    SumsFunctions,
    VariantFunctions,
)
C_TYPES = {
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
}


def of_c(text: str) -> Any:
    return ctypes.c_void_p if "*" in text else C_TYPES[text.split()[0]]


def without_comments(header: Path) -> str:
    return re.sub(r"//[^\n]*", "", header.read_text())


def functions_of(header: Path, pattern: str) -> dict[str, tuple[list[Any], Any]]:
    """The functions of a header; `pattern` matches the result's type and the name in front of the parameters."""
    found = re.findall(pattern + r"\(([^)]*)\);", without_comments(header))
    return {name: ([of_c(p.strip()) for p in arguments.split(",")], of_c(result)) for result, name, arguments in found}


def structures_of(header: Path) -> dict[str, list[tuple[str, Any]]]:
    fields: dict[str, list[tuple[str, Any]]] = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", without_comments(header), re.S):
        fields[name] = []
        for line in body.split(";"):
            kind, _, rest = line.strip().rpartition(" ") if "," not in line else line.strip().partition(" ")
            if kind or rest:
                names = rest.split(",") if "," in line else [rest]
                kind = kind if "," not in line else line.strip().split(" ", 1)[0]
                fields[name] += [(each.strip().lstrip("*"), of_c(kind)) for each in names]
    return fields


def test_cpu_functions_are_those_of_the_header() -> None:
    assert prototypes(CPUKernels) == functions_of(CPU_HEADER, r"VB_EXPORT (\w+) VB_FN\((\w+)\)")


def test_cuda_functions_are_those_of_the_header() -> None:
    declared = {name: made for protocol in CUDA_PROTOCOLS for name, made in prototypes(protocol).items()}
    assert declared == functions_of(CUDA_HEADER, r"(?m)^(int|size_t) vb_(\w+)")


@pytest.mark.parametrize(
    ("structure", "name"),
    [(CacheView, "VbCache"), (Prefill, "VbPrefill"), (Decode, "VbDecode"), (SamplingArguments, "VbSample")],
)
def test_structures_are_those_of_the_header(structure: type[ctypes.Structure], name: str) -> None:
    assert structure._fields_ == structures_of(CUDA_HEADER)[name]


@pytest.mark.parametrize("protocol", [CPUKernels, *CUDA_PROTOCOLS])
def test_no_two_pointers_of_a_function_have_one_type(protocol: type) -> None:
    for name in prototypes(protocol):
        *arguments, _ = vars(protocol)[name].__annotations__.values()
        pointers = [each.removesuffix(" | None") for each in arguments if c_type(each) is ctypes.c_void_p]
        assert len(set(pointers)) == len(pointers), f"{protocol.__name__}.{name}"


def test_what_is_no_type_of_c_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"'to\.Qeury' is neither"):
        c_type("to.Qeury")


CALLS = """
import torch
from vllm_blend.ops import pointers as to
from vllm_blend.ops.bindings import CPUKernels

def write(kernels: CPUKernels, k: torch.Tensor, v: torch.Tensor, pages: torch.Tensor, slots: to.Slots) -> None:
    keys, values = to.KeyCache(pages), to.ValueCache(pages)
    kernels.reshape_and_cache(to.Key(k), to.Value(v), keys, values, slots, 1, 8, 8, 8, 4, 0, 1)
    kernels.reshape_and_cache(to.Value(v), to.Key(k), keys, values, slots, 1, 8, 8, 8, 4, 0, 1)  # swapped
    kernels.reshape_and_cache(to.Key(k), to.Value(v), values, keys, slots, 1, 8, 8, 8, 4, 0, 1)  # swapped
    kernels.reshape_and_cache(1234, to.Value(v), keys, values, slots, 1, 8, 8, 8, 4, 0, 1)  # of no role
"""
SETTINGS = """
[mypy]
follow_imports = skip
ignore_missing_imports = true
[mypy-vllm_blend.ops.bindings,vllm_blend.ops.c_functions,vllm_blend.ops.pointers]
follow_imports = normal
"""


def test_swapped_pointers_do_not_type_check(tmp_path: Path) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "calls.py"]
    done = subprocess.run(command, cwd=tmp_path, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    lines = CALLS.splitlines()
    found = [lines[int(number) - 1] for number in re.findall(r"calls.py:(\d+): error: .*\[arg-type\]", done.stdout)]
    assert [line.partition("  # ")[2] for line in found] == ["swapped"] * 4 + ["of no role"], done.stdout + done.stderr
