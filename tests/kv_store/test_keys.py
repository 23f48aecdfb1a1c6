from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint, chunk_key, context_id, salt_digest, weights_digest

MODEL = ModelFingerprint("m", "r", "w", "float32", "rope", "tok", 2, 1, 16)
# The context [0, 7] and the chunk [5, 6] after it had these names before there were salts.
OLD_CONTEXT, OLD_KEY = "8a3d6da75668c0ceb5f754d095efaaba", "972cf2d659686d2d529cb01d59bec23b"


@pytest.mark.parametrize("field", [field.name for field in fields(ModelFingerprint)])
def test_every_property_of_the_model_is_in_the_key(field: str) -> None:
    value = getattr(MODEL, field)
    change: dict[str, Any] = {field: value + 1 if isinstance(value, int) else f"{value}x"}
    other = replace(MODEL, **change)
    context = context_id([0, 5])
    assert chunk_key(other, context, [1, 2]) != chunk_key(MODEL, context, [1, 2])


def test_the_key_is_context_and_content() -> None:
    contexts: list[list[int]] = [[], [0], [0, 1], [1, 0]]
    chunks = [[1], [1, 2], [2, 1], [12]]
    keys = {chunk_key(MODEL, context_id(context), chunk) for context in contexts for chunk in chunks}
    assert len(keys) == len(contexts) * len(chunks)
    assert chunk_key(replace(MODEL), context_id((0, 1)), (1, 2)) == chunk_key(MODEL, context_id([0, 1]), [1, 2])


def test_a_salt_makes_other_keys_and_changes_none_without() -> None:
    """This holds even where salt and content together are the same bytes, and where one salt begins with another."""
    salts = ["", "a", "a\0", "b", "aa", "\0", "a" * 64, "a" * 65, "\ud800"]
    contents: list[tuple[list[int], list[int]]] = [([], [1, 2]), ([0], [1, 2]), ([0], [1]), ([ord("a")], [1, 2])]
    digests = [salt_digest(salt) if salt else b"" for salt in salts]
    ids = [ChunkId.from_tokens(MODEL, context, chunk, salt=salt) for context, chunk in contents for salt in digests]
    assert len({chunk.key for chunk in ids}) == len({(chunk.context, chunk.token_ids) for chunk in ids}) == len(ids)
    assert len(ids) == len(salts) * len(contents)
    for chunk in ids:
        assert chunk_key(MODEL, chunk.context, chunk.token_ids) == chunk.key, "an export has all that the key needs"
    # what stores of earlier versions hold
    assert context_id([0, 7]) == OLD_CONTEXT
    assert ChunkId.from_tokens(MODEL, [0, 7], [5, 6]).key == OLD_KEY


def test_weights_are_known_by_their_content(tmp_path: Path) -> None:
    def directory(name: str, config: bytes, weights: bytes) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes(config)
        (folder / "model.safetensors").write_bytes(weights)
        return folder

    weights = bytes(range(256)) * 20_000  # five megabytes: only both ends are read
    original = weights_digest(directory("a", b"{}", weights))
    assert weights_digest(directory("b", b"{}", weights)) == original
    assert weights_digest(directory("c", b"{ }", weights)) != original
    assert weights_digest(directory("d", b"{}", b"\xff" + weights[1:])) != original
    assert weights_digest(directory("e", b"{}", weights[:-1] + b"\x00")) != original
    assert weights_digest(directory("f", b"{}", weights + b"\x00")) != original
