"""Checkpoints that are PyTorch's pickles: read like others, and never run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from tests.models.tiny import CONTEXT, load_tiny, save, tiny_hf_model
from vllm_blend.kv_store.keys import weights_digest
from vllm_blend.models.loader import load_hf_config, load_model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tiny_hf_model("llama", num_hidden_layers=2), tmp_path)
    return tmp_path


def pickled(checkpoint: Path, change: Callable[[dict[str, Any]], Any] = lambda tensors: None, **options: Any) -> Path:
    """Write the checkpoint's tensors, changed, as pytorch_model.bin instead."""
    tensors: dict[str, Any] = load_file(checkpoint / "model.safetensors")
    change(tensors)
    torch.save(tensors, checkpoint / "pytorch_model.bin", **options)
    (checkpoint / "model.safetensors").unlink()
    return checkpoint / "pytorch_model.bin"


def test_pickled_weights_are_read_as_safetensors_are(checkpoint: Path) -> None:
    expected = load_tiny(str(checkpoint)).state_dict()
    pickled(checkpoint)
    loaded = load_tiny(str(checkpoint)).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_pickles_of_before_zip_archives(checkpoint: Path) -> None:
    expected = load_tiny(str(checkpoint)).model.norm.weight
    pickled(checkpoint, _use_new_zipfile_serialization=False)
    assert torch.equal(load_tiny(str(checkpoint)).model.norm.weight, expected)


@pytest.mark.parametrize("indexed", [True, False])
def test_pickles_in_shards(checkpoint: Path, indexed: bool) -> None:
    expected = load_tiny(str(checkpoint)).state_dict()
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard_number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-0000{shard_number}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, checkpoint / file)
        weight_map |= dict.fromkeys(part, file)
    torch.save({"lr": 1e-3}, checkpoint / "training_args.bin")  # no weights: left alone
    if indexed:
        (checkpoint / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    loaded = load_tiny(str(checkpoint)).state_dict()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_safetensors_come_first(checkpoint: Path) -> None:
    (checkpoint / "pytorch_model.bin").write_bytes(b"not read")
    load_tiny(str(checkpoint))


class Payload:
    """Would write a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "ran")


def test_code_in_a_pickle_is_never_run(checkpoint: Path) -> None:
    proof = checkpoint / "proof"
    path = pickled(checkpoint, lambda tensors: tensors.update({"extra": Payload(proof)}))
    with pytest.raises(ValueError, match=r"pytorch_model\.bin has more than tensors in it"):
        load_tiny(str(checkpoint))
    assert not proof.exists()
    torch.load(path, weights_only=False)
    assert proof.read_text() == "ran", "the payload is real"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.update({"step": 3}), "must hold a dict of tensors, but 'step' is an int"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}), r"model\.norm\.weight has shape .63,."),
        (lambda tensors: tensors.pop("model.norm.weight"), r"missing: model\.norm\.weight"),
    ],
)
def test_pickles_that_do_not_fit(checkpoint: Path, change: Callable[[Any], Any], message: str) -> None:
    pickled(checkpoint, change)
    with pytest.raises(ValueError, match=message):
        load_tiny(str(checkpoint))


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_truncated_pickle_is_named(checkpoint: Path, size: int) -> None:
    path = pickled(checkpoint)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin (is damaged or not a PyTorch checkpoint|has more than)"):
        load_tiny(str(checkpoint))


@pytest.mark.parametrize("name", ["consolidated.00.pth", "weights.bin"])
def test_weights_in_another_layout_say_how_to_convert(checkpoint: Path, name: str) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    with pytest.raises(FileNotFoundError, match=f"but {name}: convert them to safetensors"):
        load_tiny(str(checkpoint))


def test_a_folder_of_gguf_names_the_file(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-Q4_K_M.gguf")
    with pytest.raises(FileNotFoundError, match=r"GGUF weights only: give the path .*model-Q4_K_M\.gguf', as"):
        load_tiny(str(checkpoint))


def test_pickles_are_downloaded_where_a_hub_model_has_nothing_else(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled(checkpoint)
    asked: list[list[str]] = []

    def snapshot_download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    config = load_hf_config(str(checkpoint))
    load_model(config, "someone/tiny", torch.float32, "cpu", max_position=CONTEXT)
    assert [patterns[0] for patterns in asked] == ["*.safetensors", "pytorch_model*.bin"]


def test_chunk_kv_of_other_pickled_weights_has_other_keys(checkpoint: Path) -> None:
    path = pickled(checkpoint)
    before = weights_digest(checkpoint)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert weights_digest(checkpoint) != before
