"""Chunk folders: what is written comes back bit for bit, and nothing that is damaged or another's ever does."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.format import ChunkMiss, load_chunk, write_chunk
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint

MODEL = ModelFingerprint("", "", "w", "float32", "rope", "tok", num_layers=2, num_kv_heads=3, head_dim=4)
CHUNK = ChunkId.from_tokens(MODEL, [0, 7], [5, 6, 7, 8, 9])
FILES = ("keys.pt", "values.pt", "valid_mask.pt", "metadata.json")


def make_kv(dtype: torch.dtype = torch.float32, tokens: int = 5) -> ChunkKV:
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 2, tokens, 3, 4, generator=generator).to(dtype)
    return ChunkKV(k, v)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_chunk(tmp_path / "c", CHUNK, make_kv(), MODEL)
    return tmp_path / "c"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_written_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    model = replace(MODEL, dtype=str(dtype).removeprefix("torch."))
    chunk, kv = ChunkId.from_tokens(model, [0, 7], CHUNK.token_ids), make_kv(dtype)
    size = write_chunk(tmp_path / "c", chunk, kv, model)
    loaded = load_chunk(tmp_path / "c", chunk, model)
    assert torch.equal(loaded.k, kv.k) and torch.equal(loaded.v, kv.v) and loaded.k.dtype == dtype
    assert size == sum(path.stat().st_size for path in (tmp_path / "c").iterdir())


def test_the_folder_holds_the_files_that_are_promised(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)  # and no temporary ones
    assert torch.load(folder / "keys.pt", weights_only=True).shape == (2, 5, 3, 4)
    assert torch.load(folder / "valid_mask.pt", weights_only=True).tolist() == [True] * 5
    metadata = json.loads((folder / "metadata.json").read_text())
    assert metadata["token_ids"] == [5, 6, 7, 8, 9] and metadata["key"] == CHUNK.key
    assert metadata["model"]["weights"] == "w"


def test_a_view_is_saved_without_the_storage_behind_it(tmp_path: Path) -> None:
    large = torch.randn(2, 1000, 3, 4)
    assert write_chunk(tmp_path / "c", CHUNK, ChunkKV(large[:, :5], large[:, 5:10]), MODEL) < 10_000
    assert torch.equal(load_chunk(tmp_path / "c", CHUNK, MODEL).k, large[:, :5])


def test_writing_again_replaces_what_is_there(folder: Path) -> None:
    other = ChunkKV(torch.ones(2, 5, 3, 4), torch.zeros(2, 5, 3, 4))
    write_chunk(folder, CHUNK, other, MODEL)
    assert torch.equal(load_chunk(folder, CHUNK, MODEL).k, other.k)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "empty", "flip", "longer", "gone"])
def test_a_damaged_file_is_a_miss_that_names_the_folder_and_the_reason(
    folder: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / name
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 0x10
        changed = {"cut": data[: len(data) // 2], "empty": bytearray(), "flip": flipped, "longer": data + b"x"}
        path.write_bytes(changed[damage])
    with pytest.raises(ChunkMiss) as miss:
        load_chunk(folder, CHUNK, MODEL)
    assert str(folder) in str(miss.value) and (name == "metadata.json" or name in str(miss.value))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_changes_what_is_read(folder: Path, name: str, where: float, bit: int) -> None:
    path = folder / name
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[int(where * len(data))] ^= 1 << bit
    path.write_bytes(flipped)
    loaded = None
    try:
        loaded = load_chunk(folder, CHUNK, MODEL)
    except ChunkMiss as miss:
        assert str(folder) in str(miss)
    finally:
        path.write_bytes(data)
    if loaded is not None:  # white space in the JSON
        assert name == "metadata.json"
        assert torch.equal(loaded.k, make_kv().k) and torch.equal(loaded.v, make_kv().v)


@pytest.mark.parametrize(
    ("field", "value"),
    [("weights", "other"), ("dtype", "bfloat16"), ("rope", "x"), ("tokenizer", "x"), ("revision", "2")],
)
def test_another_models_folder_is_foreign(folder: Path, field: str, value: str) -> None:
    changes: dict[str, Any] = {field: value}
    other = replace(MODEL, **changes)
    with pytest.raises(ChunkMiss, match=f"another model .different: {field}") as caught:
        load_chunk(folder, ChunkId.from_tokens(other, [0, 7], CHUNK.token_ids), other)
    assert caught.value.kind == "foreign"


@pytest.mark.parametrize(
    ("chunk", "reason"),
    [
        (ChunkId.from_tokens(MODEL, [0, 8], CHUNK.token_ids), "after another prefix"),
        (ChunkId.from_tokens(MODEL, [0, 7], [5, 6, 7, 8, 4]), "other tokens"),
        (replace(CHUNK, key="0" * 32), "key does not fit"),
    ],
)
def test_another_chunk_is_foreign(folder: Path, chunk: ChunkId, reason: str) -> None:
    with pytest.raises(ChunkMiss, match=reason):
        load_chunk(folder, chunk, MODEL)


def test_a_missing_folder_and_another_version_say_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ChunkMiss, match="no such folder") as caught:
        load_chunk(tmp_path / "nowhere", CHUNK, MODEL)
    assert caught.value.kind == "missing"
    metadata = json.loads((folder / "metadata.json").read_text())
    (folder / "metadata.json").write_text(json.dumps(metadata | {"version": 99}))
    with pytest.raises(ChunkMiss, match="format version 99, this package reads 1"):
        load_chunk(folder, CHUNK, MODEL)


def rewrite(folder: Path, name: str, value: object) -> None:
    """Replace a file and its checksum, as another program that knows the format would."""
    torch.save(value, folder / name)
    data = (folder / name).read_bytes()
    metadata = json.loads((folder / "metadata.json").read_text())
    metadata["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (folder / "metadata.json").write_text(json.dumps(metadata))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("keys.pt", torch.zeros(2, 4, 3, 4), r"keys.pt does not fit: it is float32 \[2, 4, 3, 4\]"),
        ("values.pt", torch.zeros(2, 5, 3, 4, dtype=torch.float16), "values.pt does not fit: it is float16"),
        ("valid_mask.pt", torch.tensor([True, True, True, False, True]), "4 of its 5 tokens are filled"),
        ("valid_mask.pt", torch.ones(5), "expected torch.bool"),
        ("keys.pt", {"k": 1}, "holds a dict, not a plain tensor"),
        ("keys.pt", Path("x"), "names pathlib.*PosixPath, which no plain tensor needs"),
    ],
)
def test_files_that_do_not_fit_are_a_miss(folder: Path, name: str, value: Any, reason: str) -> None:
    rewrite(folder, name, value)
    with pytest.raises(ChunkMiss, match=reason) as caught:
        load_chunk(folder, CHUNK, MODEL)
    assert caught.value.kind == ("foreign" if "does not fit" in reason else "damaged")


def test_an_interrupted_write_leaves_a_miss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("vllm_blend.kv_store.format.os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_chunk(folder, CHUNK, make_kv(), MODEL)
    monkeypatch.undo()
    with pytest.raises(ChunkMiss, match="writing was not finished"):
        load_chunk(folder, CHUNK, MODEL)
    assert not list(folder.glob(".*"))
