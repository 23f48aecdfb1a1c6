"""What a disk store holds comes out as the pipeline's folders, and goes in again."""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kv_store.test_import_folder import MODELS, chunk
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.export_folder import export_folder, main
from vllm_blend.kv_store.format import METADATA, ChunkMiss, load_chunk, write_chunk
from vllm_blend.kv_store.import_folder import import_folder
from vllm_blend.kv_store.keys import ModelFingerprint
from vllm_blend.kv_store.signing import ChunkSigner
from vllm_blend.kv_store.store_config import DiskStoreConfig


def opened(folder: Path, model: ModelFingerprint, **settings: Any) -> DiskChunkStore:
    return DiskChunkStore(DiskStoreConfig(folder, 1 << 20, model.digest, fingerprint=model, **settings))


def fill(folder: Path, **settings: Any) -> None:
    """Three chunks of one model and one of another."""
    for number in range(4):
        model = MODELS[number // 3]
        ids, kv = chunk(model, number)
        with opened(folder, model, **settings) as store:
            store.put(ids.key, kv.with_content(ids))


def index_of(folder: Path) -> sqlite3.Connection:
    [path] = folder.rglob("index.sqlite3")
    return sqlite3.connect(path, isolation_level=None)


def test_chunks_of_every_model_come_back_as_they_were(tmp_path: Path) -> None:
    fill(tmp_path / "store")
    assert export_folder(tmp_path / "store", tmp_path / "pt") == {"written": 4}
    for number in range(4):
        model = MODELS[number // 3]
        ids, kv = chunk(model, number)
        found = load_chunk(tmp_path / "pt" / ids.key, ids, model)
        assert torch.equal(found.k, kv.k) and torch.equal(found.v, kv.v)
    assert import_folder(tmp_path / "pt", DiskStoreConfig(tmp_path / "other", 1 << 20, "0" * 32)) == {"stored": 4}
    assert export_folder(tmp_path / "other", tmp_path / "again") == {"written": 4}
    names = [sorted(str(p.relative_to(tmp_path / top)) for p in (tmp_path / top).rglob("*")) for top in ("pt", "again")]
    assert names[0] == names[1]


@pytest.mark.parametrize("how", ["int8", "fp8"])
def test_rounded_chunks_are_written_in_the_models_dtype(tmp_path: Path, how: str) -> None:
    fill(tmp_path / "store", format=how)
    assert export_folder(tmp_path / "store", tmp_path / "pt") == {"written": 4}
    ids, kv = chunk(MODELS[0], 2)
    found = load_chunk(tmp_path / "pt" / ids.key, ids, MODELS[0])
    assert found.k.dtype == kv.k.dtype and torch.allclose(found.k, kv.k, rtol=0.07)


def test_what_cannot_be_exported_is_counted(tmp_path: Path) -> None:
    """They are chunks whose content the store was never told, and damaged chunks."""
    fill(tmp_path / "store")
    with opened(tmp_path / "store", MODELS[0]) as store:
        ids, kv = chunk(MODELS[0], 7)
        store.put(ids.key, kv)
        other, kv = chunk(MODELS[0], 8)
        store.put(ids.key[::-1], kv.with_content(other))  # under a key that is not its own
        damaged = store.space.index.find(chunk(MODELS[0], 1)[0].key)
        assert damaged is not None
    [segment] = (tmp_path / "store").rglob("*.segment")
    data = bytearray(segment.read_bytes())
    data[damaged.extent.offset] ^= 1
    segment.write_bytes(data)
    assert export_folder(tmp_path / "store", tmp_path / "pt") == {"written": 3, "unnamed": 2, "damaged": 1}
    assert len(list((tmp_path / "pt").iterdir())) == 3


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE names SET tokens = x'00'",
        "UPDATE names SET tokens = 'text'",
        "UPDATE names SET context = 'ffff'",
        "UPDATE models SET fingerprint = '{}'",
        "UPDATE models SET fingerprint = 'no json'",
        "DELETE FROM models",
        "DELETE FROM names",
    ],
)
def test_names_are_not_trusted(tmp_path: Path, damage: str) -> None:
    """The chunks can still be read, by those who know their keys."""
    fill(tmp_path / "store")
    index_of(tmp_path / "store").execute(damage)
    assert export_folder(tmp_path / "store", tmp_path / "pt") == {"unnamed": 4}
    ids, kv = chunk(MODELS[0], 0)
    with opened(tmp_path / "store", MODELS[0]) as store:
        found = store.get(ids.key)
    assert found is not None and torch.equal(found.k, kv.k)


def test_a_store_of_an_earlier_version_is_used_and_learns_names(tmp_path: Path) -> None:
    fill(tmp_path / "store")
    database = index_of(tmp_path / "store")
    for statement in ("DROP TRIGGER nameless", "DROP TABLE names", "DROP TABLE models"):
        database.execute(statement)
    database.close()
    ids, kv = chunk(MODELS[0], 5)
    with opened(tmp_path / "store", MODELS[0]) as store:
        assert chunk(MODELS[0], 0)[0].key in store
        store.put(ids.key, kv.with_content(ids))
    assert export_folder(tmp_path / "store", tmp_path / "pt") == {"written": 1, "unnamed": 4}


def test_names_leave_with_their_chunks(tmp_path: Path) -> None:
    fill(tmp_path / "store")
    with opened(tmp_path / "store", MODELS[0]) as store:
        store.remove(chunk(MODELS[0], 0)[0].key)
        store.clear()
    assert index_of(tmp_path / "store").execute("SELECT count(*) FROM names").fetchone() == (0,)


def test_an_export_takes_nothing_out_of_the_store(tmp_path: Path) -> None:
    fill(tmp_path / "store")
    before = index_of(tmp_path / "store").execute("SELECT key FROM chunks ORDER BY key").fetchall()
    export_folder(tmp_path / "store", tmp_path / "pt")
    assert index_of(tmp_path / "store").execute("SELECT key FROM chunks ORDER BY key").fetchall() == before


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "store")
    monkeypatch.setattr(sys, "argv", ["export_folder", str(tmp_path / "store"), str(tmp_path / "pt")])
    main()
    assert capsys.readouterr().out == "4 written\n"
    monkeypatch.setattr(sys, "argv", ["export_folder", str(tmp_path / "nothing"), str(tmp_path / "pt")])
    with pytest.raises(SystemExit):
        main()
    assert "holds no chunk store" in capsys.readouterr().err
    assert not os.path.exists(tmp_path / "nothing")
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["export_folder", str(tmp_path / "store"), str(tmp_path / "file" / "pt")])
    with pytest.raises(SystemExit):
        main()
    assert "file/pt not written: " in capsys.readouterr().err


def test_a_fingerprint_must_fit_the_digest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be the digest of fingerprint"):
        DiskStoreConfig(tmp_path, 1, MODELS[0].digest, fingerprint=MODELS[1])


def test_signed_stores_make_signed_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right secret nothing is exported, nor is anything lost. What is not signed, or was changed, is not
    imported."""
    (tmp_path / "secret").write_text("s" * 32)
    signer, other = ChunkSigner(b"s" * 32), ChunkSigner(b"o" * 32)
    fill(tmp_path / "store", signer=signer)
    assert export_folder(tmp_path / "store", tmp_path / "none") == {"foreign": 4}
    assert export_folder(tmp_path / "store", tmp_path / "none", other) == {"forged": 4}
    command = ["export_folder", "--key-file", str(tmp_path / "secret"), str(tmp_path / "store"), str(tmp_path / "pt")]
    monkeypatch.setattr(sys, "argv", command)
    main()
    assert len(list((tmp_path / "pt").iterdir())) == 4
    ids, kv = chunk(MODELS[0], 1)
    folder = tmp_path / "pt" / ids.key
    assert torch.equal(load_chunk(folder, ids, MODELS[0], signer).k, kv.k)
    with pytest.raises(ChunkMiss, match="not signed with this secret"):
        load_chunk(folder, ids, MODELS[0], other)
    signed = json.loads((folder / METADATA).read_text())
    write_chunk(folder, ids, ChunkKV(kv.v, kv.k), MODELS[0])  # whole in itself, and of other numbers
    unsigned = json.loads((folder / METADATA).read_text())
    target = DiskStoreConfig(tmp_path / "other", 1 << 20, "0" * 32, signer=signer)
    assert import_folder(tmp_path / "pt", target) == {"stored": 3, "unsigned": 1}
    for signature in (signed["signature"], "é", "", 5, [None]):
        (folder / METADATA).write_text(json.dumps(unsigned | {"signature": signature}))
        assert import_folder(folder, target) == {"stored": 0, "forged": 1}
    assert import_folder(folder, target, trust_unsigned=True) == {"stored": 1}
    assert export_folder(tmp_path / "other", tmp_path / "again", signer) == {"written": 4}
