"""Chunks for tests of stores. What a key stands for follows from the key: any process can check what it gets."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENXIO
from pathlib import Path
from typing import TypeVar

import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.index_rows import Entry

MODEL, OTHER_MODEL = "ab" * 16, "cd" * 16
PAGE = 4096
LAYERS, HEADS, HEAD_DIM = 4, 2, 32


T = TypeVar("T")


def there(found: T | None) -> T:
    """Return what was found: it must be there."""
    assert found is not None
    return found


def key(number: int) -> str:
    return f"{number:032x}"


def chunk(name: str, tokens: int | None = None, dtype: torch.dtype = torch.bfloat16) -> ChunkKV:
    """KV of 1 to 16 pages, if `tokens` is not given."""
    generator = torch.Generator().manual_seed(int(name[-8:], 16))
    tokens = tokens or 8 + int(name[-8:], 16) * 37 % 120
    k, v = torch.randn(2, LAYERS, tokens, HEADS, HEAD_DIM, generator=generator).to(dtype)
    return ChunkKV(k, v)


def sized(pages: int) -> ChunkKV:
    """KV that is stored in exactly so many pages."""
    bits = torch.arange(pages * PAGE // 4).remainder(0x7F80)  # of finite numbers
    kv = bits.to(torch.int16).view(1, -1, 1, 1).view(torch.bfloat16)
    return ChunkKV(kv, kv.flip(1))


def same(a: ChunkKV | None, b: ChunkKV) -> bool:
    """Return whether there is a chunk, bit for bit the other one."""
    return a is not None and all(
        x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in ((a.k, b.k), (a.v, b.v))
    )


def hold(store: DiskChunkStore, name: str) -> Entry | None:
    """Keep a chunk from leaving, as one does that reads it, until `store.space.release`; None where it is not there."""
    return store.space.hold([name]).get(name)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("v1/*.segment"))


def bytes_on_disk(folder: Path) -> int:
    """Return the bytes that the segments take, without holes. (Tables of the file system, which `du` counts, are left
    out: a file of many holes takes a page for them.)"""
    total = 0
    for path in segments(folder):
        with path.open("rb") as file:
            at, size = 0, path.stat().st_size
            while at < size:
                try:
                    start = os.lseek(file.fileno(), at, os.SEEK_DATA)
                except OSError as error:
                    assert error.errno == ENXIO  # there is nothing behind
                    break
                at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
                total += at - start
    return total


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder that is gone afterwards, in memory where the system has such: tests with thousands of writes."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
