"""The device addresses that a captured CUDA graph holds, read from its nodes, and the memory that may lie there."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from ctypes import byref, c_int, c_size_t, c_uint, c_void_p
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType
from typing import Any

import torch

from vllm_blend.attention.metadata import AttentionBackend
from vllm_blend.ops import constants

GRAPH = torch.cuda.CUDAGraph  # the class: tests that use this put a partial of it in its place
KERNEL, MEMCPY, MEMSET, CHILD = 0, 1, 2, 4  # CUgraphNodeType
BUFFER_POINTER, BUFFER_SIZE = 1, 2  # CU_LAUNCH_PARAM_*
MEMCPY_WORDS, MEMSET_WORDS = 25, 5  # of CUDA_MEMCPY3D and CUDA_MEMSET_NODE_PARAMS


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        [("function", c_void_p)]
        + [(name, c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")]
        + [(name, c_void_p) for name in ("parameters", "extra", "kernel", "context")]
    )


def addresses(graph: torch.cuda.CUDAGraph) -> set[int]:
    """Return every aligned 8-byte word in the parameters of a graph's nodes: all addresses that it holds, and numbers.

    `graph` has been captured with `keep_graph=True`. Raises RuntimeError for a node whose parameters cannot be read.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    return {word for node in _nodes(driver, graph.raw_cuda_graph()) for word in _words(driver, node)}


def _call(driver: ctypes.CDLL, name: str, *arguments: Any) -> int:
    code: int = getattr(driver, name)(*arguments)
    return code


def _must(driver: ctypes.CDLL, name: str, *arguments: Any) -> None:
    code = _call(driver, name, *arguments)
    if code:
        raise RuntimeError(f"{name} gives CUDA error {code}")


def _nodes(driver: ctypes.CDLL, graph: int) -> Iterator[c_void_p]:
    count = c_size_t(0)
    _must(driver, "cuGraphGetNodes", c_void_p(graph), None, byref(count))
    nodes = (c_void_p * count.value)()
    _must(driver, "cuGraphGetNodes", c_void_p(graph), nodes, byref(count))
    for handle in nodes:
        yield c_void_p(handle)


def _words(driver: ctypes.CDLL, node: c_void_p) -> Iterator[int]:
    kind = c_int(-1)
    _must(driver, "cuGraphNodeGetType", node, byref(kind))
    if kind.value == KERNEL:
        yield from _kernel_words(driver, node)
    elif kind.value == MEMCPY:
        copy = (ctypes.c_uint64 * (MEMCPY_WORDS + 7))()
        _must(driver, "cuGraphMemcpyNodeGetParams", node, byref(copy))
        yield from copy
    elif kind.value == MEMSET:
        fill = (ctypes.c_uint64 * (MEMSET_WORDS + 3))()
        _must(driver, "cuGraphMemsetNodeGetParams_v2", node, byref(fill))
        yield from fill
    elif kind.value == CHILD:
        child = c_void_p()
        _must(driver, "cuGraphChildGraphNodeGetGraph", node, byref(child))
        assert child.value is not None
        for inner in _nodes(driver, child.value):
            yield from _words(driver, inner)


def _kernel_words(driver: ctypes.CDLL, node: c_void_p) -> Iterator[int]:
    kernel = _KernelNode()
    _must(driver, "cuGraphKernelNodeGetParams_v2", node, byref(kernel))
    if not kernel.parameters:  # in one piece, as cuBLAS gives them
        yield from _packed_words(kernel.extra)
        return
    pointers = ctypes.cast(kernel.parameters, ctypes.POINTER(c_void_p))
    index = 0
    while True:
        offset, size = c_size_t(0), c_size_t(0)
        if kernel.kernel:
            code = _call(
                driver, "cuKernelGetParamInfo", c_void_p(kernel.kernel), c_size_t(index), byref(offset), byref(size)
            )
        else:
            code = _call(
                driver, "cuFuncGetParamInfo", c_void_p(kernel.function), c_size_t(index), byref(offset), byref(size)
            )
        if code:  # there are no more of them
            break
        yield from _words_at(pointers[index], size.value)
        index += 1


def _packed_words(extra: int | None) -> Iterator[int]:
    """Yield the words of a launch's parameters that lie in one buffer (CU_LAUNCH_PARAM_BUFFER_POINTER and _SIZE)."""
    if not extra:
        return  # a kernel without parameters
    entries = ctypes.cast(extra, ctypes.POINTER(c_void_p))
    given: dict[int, int] = {}
    while (key := entries[2 * len(given)]) is not None:
        given[key] = entries[2 * len(given) + 1] or 0
    yield from _words_at(given[BUFFER_POINTER], c_size_t.from_address(given[BUFFER_SIZE]).value)


def _words_at(address: int | None, size: int) -> Iterator[int]:
    raw = b"" if address is None else ctypes.string_at(address, size)
    return (int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw) - 7, 8))


def segments(device: torch.device) -> list[tuple[int, int, Any]]:
    """Return (start, stop, pool) of all memory that torch holds on a device; the ordinary pool is (0, 0)."""
    return [
        (segment["address"], segment["address"] + segment["total_size"], tuple(segment["segment_pool_id"]))
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index
    ]


def owned(holders: Iterable[Any]) -> tuple[list[tuple[int, int]], list[torch.cuda.CUDAGraph]]:
    """Return the memory (start, stop) of all tensors, and all graphs, that the holders of graphs refer to for good.

    Attention backends are left out: what they remember of a step is replaced by the next one.
    """
    storages = [_extent(tensor) for tensor in constants._KEPT.values()]
    graphs: list[torch.cuda.CUDAGraph] = []
    seen: set[int] = set()
    todo: list[Any] = list(holders)
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (AttentionBackend, str, bytes, int, float, type(None), type)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storages.append(_extent(item))
        elif isinstance(item, GRAPH):
            graphs.append(item)
        else:
            todo += _parts(item)
    return [extent for extent in storages if extent[0]], graphs


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) if tensor.is_cuda else (0, 0)


def _parts(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    if isinstance(item, (list, tuple, set)):
        return list(item)
    if isinstance(item, MethodType):
        return [item.__self__]
    if isinstance(item, FunctionType):
        return [cell.cell_contents for cell in item.__closure__ or ()]
    if isinstance(item, torch.nn.Module):
        return [*item.parameters(recurse=False), *item.buffers(recurse=False), *item.children(), *vars(item).values()]
    if is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in fields(item)] + list(getattr(item, "__dict__", {}).values())
    module = type(item).__module__
    return list(vars(item).values()) if module.startswith("vllm_blend") and hasattr(item, "__dict__") else []
