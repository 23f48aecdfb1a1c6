"""What the pipeline has written is what an engine finds on its disk."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.format import KEYS, METADATA, write_chunk
from vllm_blend.kv_store.import_folder import NO_MODEL, import_folder, main
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint
from vllm_blend.kv_store.store_config import DiskStoreConfig

MODELS = [ModelFingerprint("m", "", weights, "float32", "rope", "tokenizer", 2, 1, 4) for weights in ("w", "v")]


def chunk(model: ModelFingerprint, number: int) -> tuple[ChunkId, ChunkKV]:
    ids = ChunkId.from_tokens(model, [1, 2], [number, 3, 4])
    kv = torch.full((2, 3, 1, 4), float(number))
    return ids, ChunkKV(kv, -kv)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three chunks of one model and one of another."""
    for number in range(4):
        model = MODELS[number // 3]
        write_chunk(tmp_path / "pt" / f"{number}", *chunk(model, number), model)
    return tmp_path / "pt"


def config(folder: Path, model: str = NO_MODEL) -> DiskStoreConfig:
    return DiskStoreConfig(folder, 1 << 20, model)


def test_chunks_of_every_model_are_found_again(source: Path, tmp_path: Path) -> None:
    assert import_folder(source, config(tmp_path / "store")) == {"stored": 4}
    for number in range(4):
        model = MODELS[number // 3]
        ids, kv = chunk(model, number)
        with DiskChunkStore(config(tmp_path / "store", model.digest)) as store:
            found = store.get(ids.key)
        assert found is not None and torch.equal(found.k, kv.k) and torch.equal(found.v, kv.v)
    assert import_folder(source, config(tmp_path / "store")) == {"stored": 0, "present": 4}


def test_what_is_damaged_is_left_out(source: Path, tmp_path: Path) -> None:
    (source / "0" / KEYS).write_bytes(b"no tensor")
    text = (source / "1" / METADATA).read_text()
    (source / "1" / METADATA).write_text(text.replace('"key": "', '"key": "f', 1))
    (source / "2" / METADATA).write_text('{"model": 3}')
    assert import_folder(source, config(tmp_path / "store")) == {"stored": 1, "damaged": 2, "foreign": 1}


def test_the_command(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["import_folder", str(source), str(tmp_path / "store"), "--format", "int8"])
    main()
    assert capsys.readouterr().out == "4 stored\n"
    (tmp_path / "file").touch()
    for arguments, message in (
        ([str(tmp_path / "nothing"), "x"], "holds no chunk"),
        ([str(source), "x", "--gib", "0"], "must be positive"),
        ([str(source), str(tmp_path / "file" / "store")], "file/store cannot be used: "),
    ):
        monkeypatch.setattr(sys, "argv", ["import_folder", *arguments])
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().err
