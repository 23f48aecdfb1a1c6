"""Two processes that begin a segment at once write one file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vllm_blend.kv_store import segment
from vllm_blend.kv_store.host_memory import PAGE, aligned_empty
from vllm_blend.kv_store.regular_file import open_regular
from vllm_blend.kv_store.segment import Extent, SegmentFiles

pytestmark = pytest.mark.cpu_only


def test_two_that_begin_a_segment_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One finds no file; before it makes one, the other has made it and written its chunk."""
    name = "a" * 32
    slow, quick = SegmentFiles(tmp_path, direct=False), SegmentFiles(tmp_path, direct=False)
    theirs, ours = Extent(name, 0, PAGE), Extent(name, PAGE, PAGE)

    def find_nothing(path: Path, flags: int) -> int:
        monkeypatch.setattr(segment, "open_regular", open_regular)
        quick.write([(theirs, page(1))])
        raise FileNotFoundError(path)

    monkeypatch.setattr(segment, "open_regular", find_nothing)
    slow.write([(ours, page(2))])
    reader = SegmentFiles(tmp_path, direct=False)
    for extent, value in ((theirs, 1), (ours, 2)):
        read = aligned_empty(PAGE)
        reader.read(extent, 0, read)
        assert torch.equal(read, page(value))
    for files in (slow, quick, reader):
        files.close()


def page(value: int) -> torch.Tensor:
    """A page of one byte."""
    return aligned_empty(PAGE).fill_(value)
