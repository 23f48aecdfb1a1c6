"""Keys of chunk KV: two pieces are the same if their content is, wherever they come from.

A key covers the model's weights and revision, dtype, RoPE parameters, tokenizer, what stood before the chunk when it
was encoded, its token ids, and the salt of the prompt that brought it, where that has one. What stood beside the chunk
in some request is no part of it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

_READ_WHOLE = 1 << 30  # bytes
_STRIDE, _SAMPLE = 1 << 20, 1 << 12  # of larger files: this much of every so much


@dataclass(frozen=True)
class ModelFingerprint:
    """The properties of a model that its KV depends on."""

    model: str
    revision: str
    weights: str
    dtype: str
    rope: str
    tokenizer: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


def weights_digest(model: Path, *parts: Path) -> str:
    """Return a digest of config.json and of every weight file in a model directory, or of a model that is one file, or
    several `parts` of one.

    Files up to 1 GiB are read whole. Of larger ones, the header and 4 KiB of every MiB are: a matrix of a model that
    size spans megabytes, so retraining any of them shows, and start-up stays a matter of seconds.
    """
    digest = hashlib.sha256()
    config = model / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    if model.is_file():
        files = [model, *parts]
    else:
        files = [path for pattern in ("*.safetensors", "*.bin") for path in model.glob(pattern)]
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            if size <= _READ_WHOLE:
                for piece in iter(partial(file.read, _STRIDE), b""):
                    digest.update(piece)
            else:
                digest.update(file.read(_STRIDE))  # the header names every tensor and its place
                for offset in range(_STRIDE, size, _STRIDE):
                    file.seek(offset)
                    digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:32]


def salt_digest(cache_salt: str) -> bytes:
    """Return what stands for a prompt's `cache_salt` from the moment it is parsed: 32 bytes. The salt itself is kept
    nowhere."""
    return hashlib.sha256(b"vllm-blend cache_salt\0" + cache_salt.encode("utf-8", "surrogatepass")).digest()


def context_id(context_token_ids: Sequence[int], salt: bytes = b"") -> str:
    """Return the identity of what stands before a chunk when it is encoded, and for which `salt_digest` (b"": none).

    A salted identity is an HMAC, so no salt and tokens together can give what another salt, or none, gives for other
    tokens. The key has a fixed length: HMAC pads shorter ones with zeros.
    """
    if not salt:
        return _ids_digest(context_token_ids)
    return hmac.digest(salt, _as_bytes(context_token_ids), "sha256").hex()[:32]


def chunk_key(model: ModelFingerprint, context: str, token_ids: Sequence[int]) -> str:
    """Return the key of a chunk's KV: 32 hex digits."""
    content = f"{model.digest}/{context}/{_ids_digest(token_ids)}"
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class ChunkId:
    """A chunk by its content: the key of its KV, and what the key was made from besides the model."""

    key: str
    context: str  # context_id of what stands before the chunk when it is encoded, and of the salt
    token_ids: tuple[int, ...]

    @classmethod
    def from_tokens(
        cls, model: ModelFingerprint, context: Sequence[int], token_ids: Sequence[int], salt: bytes = b""
    ) -> ChunkId:
        """Return the chunk `token_ids`, encoded after the tokens `context` for prompts with this `salt_digest`."""
        return cls.from_context(context_id(context, salt), model, token_ids)

    @classmethod
    def from_context(cls, context: str, model: ModelFingerprint, token_ids: Sequence[int]) -> ChunkId:
        """Return the chunk `token_ids`, encoded after what has the `context_id` `context`."""
        return cls(chunk_key(model, context, token_ids), context, tuple(token_ids))


def _ids_digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(_as_bytes(token_ids)).hexdigest()[:32]


def _as_bytes(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()  # the bytes of NumPy's int64
