"""Files that others put where chunks are expected: each costs one chunk and a warning, and nothing waits, runs code
or takes memory for it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import socket
import tracemalloc
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kv_store.stored_chunks import chunk as disk_chunk
from tests.kv_store.stored_chunks import key, same
from vllm_blend.kv_store import regular_file
from vllm_blend.kv_store.chunk_kv import ChunkKV, ExpectedChunk
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.format import KEYS, METADATA, ChunkMiss, load_chunk, read_identity, write_chunk
from vllm_blend.kv_store.import_folder import NO_MODEL, import_folder
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint
from vllm_blend.kv_store.layout import ChunkLayout, StoredFormat
from vllm_blend.kv_store.regular_file import NotRegular
from vllm_blend.kv_store.remote import MAX_CALLS, RemoteChunkStore
from vllm_blend.kv_store.serialization import max_bytes_of, serialize, to_bytes
from vllm_blend.kv_store.store_config import DiskStoreConfig, RemoteStoreConfig
from vllm_blend.kv_store.tensor_file import BadTensorFile, read_tensor

MODEL = ModelFingerprint("m", "", "w", "float32", "rope", "tokenizer", 2, 1, 4)
SMALL = 64 << 20  # bytes of memory that nothing here comes near


def chunk(number: int) -> tuple[ChunkId, ChunkKV]:
    kv = torch.full((2, 3, 1, 4), float(number))
    return ChunkId.from_tokens(MODEL, [1, 2], [number, 3, 4]), ChunkKV(kv, -kv)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def rewrite(folder: Path, name: str, data: bytes) -> None:
    """Replace a file and its checksum."""
    (folder / name).write_bytes(data)
    metadata = json.loads((folder / METADATA).read_text())
    metadata["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    (folder / METADATA).write_text(json.dumps(metadata))


def repacked(data: bytes, change: Callable[[str, bytes], bytes | None], method: int = zipfile.ZIP_STORED) -> bytes:
    """A `.pt` file with some of its records changed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(buffer, "w", method) as new:
        for name in old.namelist():
            record = change(name, old.read(name))
            if record is not None:
                new.writestr(name, record)
    return buffer.getvalue()


class Evil:
    """Leaves a file behind where it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.mkdir, ("ran",))


def storage(record: str, count: int, offset: int = 0) -> bytes:
    """A pickle of a tensor of the right shape whose storage is said to have `count` numbers."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> Any:
            return ("storage", torch.FloatStorage, record, "cpu", count) if value is Evil else None

    class Tensor:
        def __reduce__(self) -> Any:
            return (torch._utils._rebuild_tensor_v2, (Evil, offset, (2, 3, 1, 4), (12, 4, 4, 1), False, {}))

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(Tensor())
    return buffer.getvalue()


GOOD = saved(chunk(1)[1].k)


def with_pickle(data: bytes) -> bytes:
    return repacked(GOOD, lambda name, record: data if name.endswith("data.pkl") else record)


def two_pickles() -> bytes:
    buffer = io.BytesIO(GOOD)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("other/data.pkl", archive.read("archive/data.pkl"))
    return buffer.getvalue()


empty_sparse: Callable[..., torch.Tensor] = torch.sparse_coo_tensor
TENSORS: dict[str, bytes] = {
    "sparse": saved(torch.zeros(2, 3, 1, 4).to_sparse()),
    "huge sparse": saved(empty_sparse(size=(2**40, 2**20))),
    "csr": saved(torch.eye(3).to_sparse_csr()),
    "meta": saved(torch.zeros(2, 3, 1, 4, device="meta")),
    "huge meta": saved(torch.empty(2**40, 3, device="meta")),
    "quantized": saved(torch.quantize_per_tensor(torch.zeros(2, 3, 1, 4), 1.0, 0, torch.qint8)),
    "parameter": saved(torch.nn.Parameter(torch.zeros(2, 3, 1, 4))),
    "complex": saved(torch.zeros(2, 3, 1, 4, dtype=torch.complex64)),
    "float64": saved(torch.zeros(2, 3, 1, 4, dtype=torch.float64)),
    "expanded": saved(torch.zeros(1).expand(2, 3, 1, 4)),
    "transposed": saved(torch.zeros(4, 1, 3, 2).permute(3, 2, 1, 0)),
    "a part of a storage": saved(torch.zeros(4, 3, 1, 4)[1:3]),
    "no tensor": saved([1, 2]),
    "code": saved(Evil()),
    "code, bare": pickle.dumps(Evil()),
    "code in the pickle": with_pickle(pickle.dumps(Evil(), 2)),
    "a storage beyond its record": with_pickle(storage("0", 1 << 50)),
    "a storage from its middle": with_pickle(storage("0", 24, 4)),
    "a storage elsewhere": with_pickle(storage("../../0", 24)),
    "a memo of four billion": with_pickle(b"\x80\x02Kdr\xff\xff\xff\xff."),
    "a pickle of 100,000 levels": with_pickle(b"\x80\x02" + b"(" * 50_000 + b"t" * 50_000 + b"."),
    "packed": repacked(GOOD, lambda name, record: record, zipfile.ZIP_DEFLATED),
    "a bomb": repacked(
        GOOD, lambda name, record: bytes(1 << 26) if name.endswith("data/0") else record, zipfile.ZIP_DEFLATED
    ),
    "the other byte order": repacked(GOOD, lambda name, record: b"big" if name.endswith("byteorder") else record),
    "no numbers": repacked(GOOD, lambda name, record: None if name.endswith("data/0") else record),
    "two pickles": two_pickles(),
    "nothing": b"",
    "half": GOOD[: len(GOOD) // 2],
}


@pytest.mark.parametrize("which", TENSORS)
def test_a_tensor_file_that_is_not_a_plain_tensor_is_one_skipped_chunk(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        write_chunk(tmp_path / "pt" / str(number), *chunk(number), MODEL)
    rewrite(tmp_path / "pt" / "1", KEYS, TENSORS[which])
    tracemalloc.start()
    counts = import_folder(tmp_path / "pt", DiskStoreConfig(tmp_path / "store", 1 << 20, NO_MODEL, staging_bytes=0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert counts["stored"] == 2 and sum(counts.values()) == 3 and peak < SMALL
    assert caplog.text.count("not imported") == 1 and str(tmp_path / "pt" / "1") in caplog.text
    assert not (tmp_path / "ran").exists()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
@example(data=None)
def test_only_what_was_saved_is_read(data: st.DataObject | None) -> None:
    """Every plain tensor comes back as torch would load it, and a flipped byte never gives anything but a tensor of as
    many numbers, or an error."""
    if data is None:
        assert torch.equal(read_tensor(GOOD), chunk(1)[1].k)
        return
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.int32]))
    shape = data.draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.randint(0, 2, shape).to(dtype)
    file = saved(tensor)
    found = read_tensor(file)
    assert found.dtype == dtype and torch.equal(found, torch.load(io.BytesIO(file), weights_only=True))
    at = data.draw(st.integers(0, len(file) - 1))
    flipped = file[:at] + bytes([file[at] ^ data.draw(st.integers(1, 255))]) + file[at + 1 :]
    try:
        found = read_tensor(flipped)
    except BadTensorFile:
        return
    assert found.nbytes <= len(flipped) and found.layout is torch.strided and found.is_contiguous()


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


METADATAS: dict[str, Callable[[dict[str, Any]], str]] = {
    "nested lists": lambda m: json.dumps(m)[:-1] + f', "x": {deep(200_000)}}}',
    "nested token ids": lambda m: json.dumps(m | {"token_ids": "@"}).replace('"@"', deep(900)),
    "2**70 as a token": lambda m: json.dumps(m | {"token_ids": [2**70]}),
    "2**31 as a token": lambda m: json.dumps(m | {"token_ids": [2**31, 3, 4]}),
    "a negative token": lambda m: json.dumps(m | {"token_ids": [-1, 3, 4]}),
    "a token that is true": lambda m: json.dumps(m | {"token_ids": [True, 3, 4]}),
    "Infinity as a token": lambda m: json.dumps(m | {"token_ids": [float("inf"), 3, 4]}),
    "NaN as a token": lambda m: json.dumps(m | {"token_ids": [float("nan"), 3, 4]}),
    "no tokens": lambda m: json.dumps(m | {"token_ids": []}),
    "tokens in a string": lambda m: json.dumps(m | {"token_ids": "123"}),
    "a number of 5,000 digits": lambda m: json.dumps(m | {"version": "@"}).replace('"@"', "9" * 5000),
    "2**70 layers": lambda m: json.dumps(m | {"model": m["model"] | {"num_layers": 2**70}}),
    "2**30 layers": lambda m: json.dumps(m | {"model": m["model"] | {"num_layers": 2**30}}),
    "NaN layers": lambda m: json.dumps(m | {"model": m["model"] | {"num_layers": float("nan")}}),
    "2.0 layers": lambda m: json.dumps(m | {"model": m["model"] | {"num_layers": 2.0}}),
    "another dtype": lambda m: json.dumps(m | {"model": m["model"] | {"dtype": "float64"}}),
    "a dtype that is none": lambda m: json.dumps(m | {"model": m["model"] | {"dtype": ["float32"]}}),
    "a model of lists": lambda m: json.dumps(m | {"model": [1]}),
    "a context that is none": lambda m: json.dumps(m | {"context": {"a": 1}}),
    "half a character": lambda m: json.dumps(m | {"context": "\ud800"}),
    "NaN bytes": lambda m: json.dumps(m | {"files": {name: {"bytes": float("nan")} for name in m["files"]}}),
    "2**70 bytes": lambda m: json.dumps(m | {"files": {name: {"bytes": 2**70} for name in m["files"]}}),
    "no files": lambda m: json.dumps(m | {"files": 1}),
    "no object": lambda m: "3",
}


@pytest.mark.parametrize("which", METADATAS)
def test_metadata_of_any_kind_is_one_skipped_chunk(
    which: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        write_chunk(tmp_path / "pt" / str(number), *chunk(number), MODEL)
    path = tmp_path / "pt" / "1" / METADATA
    path.write_text(METADATAS[which](json.loads(path.read_text())))
    counts = import_folder(tmp_path / "pt", DiskStoreConfig(tmp_path / "store", 1 << 20, NO_MODEL))
    assert counts["stored"] == 2 and sum(counts.values()) == 3
    assert caplog.text.count("not imported") == 1 and len(caplog.text) < 2000
    if which not in ("a token that is true", "2.0 layers"):  # which equal what an engine asks for
        with pytest.raises(ChunkMiss):
            load_chunk(tmp_path / "pt" / "1", chunk(1)[0], MODEL)


@pytest.mark.parametrize("kind", ["float64", "no tokens"])
def test_kv_that_no_store_keeps_is_one_skipped_chunk(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder that fits what it says in all."""
    model = replace(MODEL, dtype="float64") if kind == "float64" else MODEL
    ids = ChunkId.from_tokens(model, [1, 2], [] if kind == "no tokens" else [7, 3, 4])
    kv = torch.zeros(2, len(ids.token_ids), 1, 4, dtype=getattr(torch, model.dtype))
    write_chunk(tmp_path / "pt" / "0", ids, ChunkKV(kv, kv), model)
    write_chunk(tmp_path / "pt" / "1", *chunk(1), MODEL)
    counts = import_folder(tmp_path / "pt", DiskStoreConfig(tmp_path / "store", 1 << 20, NO_MODEL))
    assert counts["stored"] == 1 and sum(counts.values()) == 2 and caplog.text.count("not imported") == 1


def fifo(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        directory = os.open(path.parent, os.O_RDONLY)  # paths of sockets are short
        server.bind(f"/proc/self/fd/{directory}/{path.name}")
        os.close(directory)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


SPECIAL: dict[str, Callable[[Path], object]] = {
    "FIFO": fifo,
    "socket": unix_socket,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
    "sparse": sparse,
}


@pytest.mark.parametrize("name", [KEYS, METADATA])
@pytest.mark.parametrize("what", SPECIAL)
def test_a_chunk_file_that_holds_no_bytes_is_one_skipped_chunk(
    what: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        write_chunk(tmp_path / "pt" / str(number), *chunk(number), MODEL)
    (tmp_path / "pt" / "1" / name).unlink()
    SPECIAL[what](tmp_path / "pt" / "1" / name)
    if what == "sparse" and name == KEYS:  # that says how large it is
        path = tmp_path / "pt" / "1" / METADATA
        metadata = json.loads(path.read_text())
        metadata["files"][KEYS]["bytes"] = 1 << 42
        path.write_text(json.dumps(metadata))
    counts = import_folder(tmp_path / "pt", DiskStoreConfig(tmp_path / "store", 1 << 20, NO_MODEL))
    assert counts["stored"] == 2 and caplog.text.count("not imported") == 1
    with pytest.raises(ChunkMiss, match=f"{name} cannot be read"):
        load_chunk(tmp_path / "pt" / "1", chunk(1)[0], MODEL)


@pytest.mark.parametrize(("what", "flags"), [("FIFO", os.O_RDONLY), ("FIFO", os.O_RDWR), ("device", os.O_RDWR)])
def test_a_file_that_turns_into_another_before_it_is_opened_is_refused_at_once(
    what: str, flags: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def turn(path: Path, follow_link: bool) -> None:
        path.unlink()
        SPECIAL[what](path)

    (tmp_path / "file").write_bytes(b"a regular file")
    monkeypatch.setattr(regular_file, "require_regular", turn)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(regular_file.open_regular, tmp_path / "file", flags)
        try:
            with pytest.raises(NotRegular, match="is not a regular file: move it away"):
                opening.result(timeout=30)
        finally:
            os.close(os.open(tmp_path / "file", os.O_RDWR))  # a writer, so that an open that waits for one ends


def test_folders_of_many_models_need_one_store_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, most = [0], [0]
    enter, close = DiskChunkStore.__init__, DiskChunkStore.close

    def count(self: DiskChunkStore, config: DiskStoreConfig) -> None:
        enter(self, config)
        opened[0] += 1
        most[0] = max(most[0], opened[0])

    def discount(self: DiskChunkStore) -> None:
        opened[0] -= self._pool is not None
        close(self)

    monkeypatch.setattr(DiskChunkStore, "__init__", count)
    monkeypatch.setattr(DiskChunkStore, "close", discount)
    for number in range(5):
        model = replace(MODEL, weights=str(number))
        ids = ChunkId.from_tokens(model, [1, 2], [number, 3, 4])
        write_chunk(tmp_path / "pt" / str(number), ids, chunk(number)[1], model)
    assert import_folder(tmp_path / "pt", DiskStoreConfig(tmp_path / "store", 1 << 20, NO_MODEL)) == {"stored": 5}
    assert most == [1] and opened == [0]


@pytest.mark.parametrize("what", [what for what in SPECIAL if what != "sparse"])
def test_a_segment_that_is_no_file_is_a_miss(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = DiskStoreConfig(tmp_path, 1 << 22, MODEL.digest, segment_bytes=4096, timeout=60)
    with DiskChunkStore(config) as store:
        for number in range(3):
            store.put(key(number), disk_chunk(key(number)))
        victim = store.space.index.find(key(1))
        assert victim is not None
    path = tmp_path / "v1" / f"{victim.extent.segment}.segment"
    path.unlink()
    SPECIAL[what](path)
    with DiskChunkStore(config) as store:
        assert store.get(key(1)) is None and store.stats.misses == {"damaged": 1}
        assert caplog.text.count("not used, it will be computed again") == 1
        for number in (0, 2):
            assert same(store.get(key(number)), disk_chunk(key(number)))
        store.put(key(1), disk_chunk(key(1)))
        assert same(store.get(key(1)), disk_chunk(key(1)))
        store.clear()
        assert len(store) == store.num_bytes == 0


@pytest.mark.parametrize("what", [what for what in SPECIAL if what != "sparse"])
@pytest.mark.parametrize("name", ["index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm", "locks", "open.lock"])
def test_an_index_or_a_lock_that_is_no_file_is_an_error_that_names_it(what: str, name: str, tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    SPECIAL[what](tmp_path / "v1" / name)
    with pytest.raises(NotRegular, match=r"no.* regular file") as raised:
        DiskChunkStore(DiskStoreConfig(tmp_path, 1 << 20, MODEL.digest))
    assert name in str(raised.value)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("name", ["segment", "index.sqlite3", "index.sqlite3-wal", "locks", "open.lock"])
def test_nothing_is_written_through_a_link(name: str, exists: bool, tmp_path: Path) -> None:
    """The store's folder itself may be a link."""
    (tmp_path / "there").mkdir()
    (tmp_path / "store").symlink_to("there")
    config = DiskStoreConfig(tmp_path / "store", 1 << 22, MODEL.digest, timeout=60)
    with DiskChunkStore(config) as store:
        for number in range(2):
            store.put(key(number), disk_chunk(key(number)))
        path = next((tmp_path / "store" / "v1").glob("*.segment"))
    path = path if name == "segment" else path.with_name(name)
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "elsewhere")
    content = bytes(2 << 20) if exists else None  # where exactly the segment would be written
    if content is not None:
        (tmp_path / "elsewhere").write_bytes(content)
    if name == "segment":
        with DiskChunkStore(config) as store:
            store.put(key(2), disk_chunk(key(2)))  # which follows the others in their segment
            assert same(store.get(key(2)), disk_chunk(key(2)))
            assert store.get(key(0)) is None and store.get(key(1)) is None and not path.is_symlink()
    else:
        with pytest.raises(NotRegular, match=f"{name} is a symbolic link, not a regular file"):
            DiskChunkStore(config)
    elsewhere = tmp_path / "elsewhere"
    assert (elsewhere.read_bytes() if elsewhere.exists() else None) == content


def test_a_segment_of_the_index_does_not_name_another_folder(tmp_path: Path) -> None:
    with DiskChunkStore(DiskStoreConfig(tmp_path / "store", 1 << 22, MODEL.digest)) as store:
        store.space.index._db.execute("INSERT INTO segments VALUES ('../../outside', 0)")
        store.put(key(1), disk_chunk(key(1)))
        assert store.stats.num_stored == 0 and store.stats.refused["failed"] == 1
    assert not list(tmp_path.glob("outside*"))


def test_an_identity_is_what_was_written(tmp_path: Path) -> None:
    write_chunk(tmp_path / "c", *chunk(1), MODEL)
    ids, model = read_identity(tmp_path / "c")
    assert ids == chunk(1)[0] and asdict(model) == asdict(MODEL)


@pytest.mark.parametrize("what", SPECIAL)
def test_an_object_of_a_folder_that_is_no_file_is_a_miss(what: str, tmp_path: Path) -> None:
    """Nothing waits for a FIFO, and of a value that is larger than the chunk no more is read."""
    ids, kv = chunk(1)
    config = RemoteStoreConfig(f"file://{tmp_path}", MODEL.digest, timeout=60, max_failures=9)
    store = RemoteChunkStore(config)
    store.put(ids.key, kv)
    [path] = tmp_path.glob("**/" + ids.key)
    path.unlink()
    SPECIAL[what](path)
    tracemalloc.start()
    assert store.get(ids.key, expected=ExpectedChunk(MODEL, ids)) is None
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < SMALL and store._calls._value == MAX_CALLS, "no thread is left waiting"
    assert store.stats.misses == {("truncated" if what == "sparse" else "unavailable"): 1}


@pytest.mark.parametrize("format", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_what_is_read_of_a_value_is_enough_for_every_chunk(format: StoredFormat, tokens: int) -> None:
    for dtype in ("float32", "bfloat16"):
        model = replace(MODEL, dtype=dtype, num_kv_heads=3, head_dim=2)
        ids = ChunkId.from_tokens(model, [], range(tokens))
        kv = torch.zeros(2, tokens, 3, 2, dtype=getattr(torch, dtype))
        chunk = ChunkKV(kv, kv)
        data = to_bytes(serialize(ids.key, model.digest, chunk, ChunkLayout.from_kv(chunk, format)))
        assert len(data) <= max_bytes_of(ExpectedChunk(model, ids)) < len(data) + (1 << 16)
