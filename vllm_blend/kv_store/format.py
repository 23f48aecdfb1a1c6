"""A chunk's KV as a folder: keys.pt, values.pt, valid_mask.pt and metadata.json.

keys.pt and values.pt hold K before RoPE and V, each [layers, tokens, kv_heads, head_dim]; valid_mask.pt is [tokens]
bool, True where both are filled. metadata.json says which model, context and tokens they belong to, with a SHA-256 of
each file. It is removed first and written last: a folder whose writing was cut short has none, and is a miss. With a
`ChunkSigner` it is signed, and read only if that has signed it.

Nothing here is trusted when it is read: no more bytes are read than a chunk of the model has, their checksum is
compared before anything else looks at them, and they are only taken for plain tensors (tensor_file.py). A folder that
is damaged, unfinished or another model's is a miss: the caller computes the chunk again.
"""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import logging
import os
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

import torch

from vllm_blend.checks import a_type
from vllm_blend.kv_store.chunk_kv import STORED_DTYPES, ChunkKV, ExpectedChunk, find_mismatch, is_finite
from vllm_blend.kv_store.keys import ChunkId, ModelFingerprint, chunk_key
from vllm_blend.kv_store.regular_file import read_regular
from vllm_blend.kv_store.signing import ChunkSigner
from vllm_blend.kv_store.tensor_file import OVERHEAD, BadTensorFile, read_tensor
from vllm_blend.ops.e4m3 import E4M3

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
METADATA = "metadata.json"
KEYS, VALUES, VALID_MASK = "keys.pt", "values.pt", "valid_mask.pt"

MAX_METADATA = 32 << 20  # bytes: three million token ids
MAX_NUMBER = 1 << 31  # of layers, heads and token ids: no model has so many

MissKind = Literal["missing", "damaged", "foreign", "unsigned", "forged"]


class ChunkMiss(Exception):
    """A folder does not hold the chunk that was asked for. `kind` is for counting, the message for people."""

    def __init__(self, folder: Path, kind: MissKind, reason: str) -> None:
        super().__init__(f"{folder}: {reason}")
        self.folder, self.kind, self.reason = folder, kind, reason


def write_chunk(
    folder: str | Path, chunk: ChunkId, kv: ChunkKV, model: ModelFingerprint, signer: ChunkSigner | None = None
) -> int:
    """Write `kv` to `folder`, replacing what is there; returns the bytes written. OSError when the disk refuses."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / METADATA).unlink(missing_ok=True)
    tensors = {KEYS: kv.k, VALUES: kv.v, VALID_MASK: torch.ones(kv.num_tokens, dtype=torch.bool)}
    metadata: dict[str, Any] = _metadata(chunk, model) | {"files": {}}
    size = 0
    for name, tensor in tensors.items():
        buffer = io.BytesIO()
        if tensor.dtype is E4M3:  # torch.save writes these in a way of their own: as bytes they are plain tensors
            tensor = tensor.view(torch.uint8)
        # A clone: saving a view would save all of the storage behind it.
        torch.save(tensor.detach().to("cpu", copy=True).contiguous(), buffer)
        data = buffer.getvalue()
        metadata["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
        size += _write(folder / name, data)
    if signer is not None:
        metadata["signature"] = signer.folder_signature(_signed_part(metadata))
    return size + _write(folder / METADATA, (json.dumps(metadata, indent=1) + "\n").encode())


def load_chunk(
    folder: str | Path, chunk: ChunkId, model: ModelFingerprint, signer: ChunkSigner | None = None
) -> ChunkKV:
    """Return the KV of `chunk`, on the CPU. Raises ChunkMiss when the folder does not hold it, whole and of this
    model, and with a signer when that has not signed it."""
    folder = Path(folder)
    if model.dtype not in STORED_DTYPES:
        raise ChunkMiss(folder, "foreign", f"KV of {model.dtype} is not stored: {', '.join(STORED_DTYPES)} are")
    if not folder.is_dir():
        raise ChunkMiss(folder, "missing", "there is no such folder")
    metadata = _read_metadata(folder)
    if signer is not None:
        _check_signature(folder, metadata, signer)
    _check_identity(folder, metadata, chunk, model)
    expected, tokens = ExpectedChunk(model, chunk), len(chunk.token_ids)
    k, v = (_read_tensor(folder, name, metadata, expected.num_bytes // 2) for name in (KEYS, VALUES))
    if STORED_DTYPES[model.dtype] is E4M3:
        k, v = (t.view(E4M3) if t.dtype is torch.uint8 else t for t in (k, v))
    for name, tensor in ((KEYS, k), (VALUES, v)):
        mismatch = find_mismatch(expected, tensor.shape, tensor.dtype)
        if mismatch is not None:
            raise ChunkMiss(folder, "foreign", f"{name} does not fit: {mismatch}")
        if not is_finite(tensor):
            raise ChunkMiss(folder, "damaged", f"{name} has numbers that are not finite")
    valid = _read_tensor(folder, VALID_MASK, metadata, tokens)
    if valid.dtype != torch.bool or tuple(valid.shape) != (tokens,):
        found = f"{valid.dtype} {list(valid.shape)}"
        raise ChunkMiss(folder, "damaged", f"{VALID_MASK} is {found}, expected torch.bool [{tokens}]")
    if not bool(valid.all()):
        raise ChunkMiss(folder, "damaged", f"{int(valid.sum())} of its {tokens} tokens are filled ({VALID_MASK})")
    return ChunkKV(k, v)


def read_identity(folder: str | Path) -> tuple[ChunkId, ModelFingerprint]:
    """Return which chunk a folder says it holds, and of which model; `load_chunk` checks that. Raises ChunkMiss."""
    folder = Path(folder)
    metadata = _read_metadata(folder)
    try:
        model = ModelFingerprint(**metadata["model"])
        context, token_ids = metadata["context"], metadata["token_ids"]
        _check_identity_types(model, context, token_ids)
        return ChunkId(chunk_key(model, context, token_ids), context, tuple(token_ids)), model
    except (KeyError, TypeError, ValueError) as error:
        raise ChunkMiss(folder, "damaged", f"{METADATA} does not say what it holds ({_summarize(error)})") from error


def _metadata(chunk: ChunkId, model: ModelFingerprint) -> dict[str, Any]:
    return {
        "version": FORMAT_VERSION,
        "key": chunk.key,
        "context": chunk.context,
        "num_tokens": len(chunk.token_ids),
        "token_ids": list(chunk.token_ids),
        "layout": "[layers, tokens, kv_heads, head_dim], keys before RoPE",
        "model": asdict(model),
    }


def _signed_part(metadata: dict[str, Any]) -> bytes:
    """Return what a signature is for: all but the signature, as JSON of one form."""
    rest = {name: value for name, value in metadata.items() if name != "signature"}
    return json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()


def _check_signature(folder: Path, metadata: dict[str, Any], signer: ChunkSigner) -> None:
    signature = metadata.get("signature")
    if signature is None:
        raise ChunkMiss(folder, "unsigned", "it is not signed, and signed folders alone are taken")
    expected = signer.folder_signature(_signed_part(metadata))
    if not isinstance(signature, str) or not hmac.compare_digest(
        expected.encode(), signature.encode("utf-8", "replace")
    ):
        raise ChunkMiss(folder, "forged", "it is not signed with this secret")


def _check_identity_types(model: ModelFingerprint, context: object, token_ids: object) -> None:
    """Raise ValueError or TypeError unless these are what `write_chunk` writes."""
    for field in fields(model):
        value = getattr(model, field.name)
        if field.type == "int":
            _check_number(value, 1, f"model.{field.name}")
        elif not isinstance(value, str):
            raise TypeError(f"model.{field.name} is {a_type(value)}")
    if not isinstance(context, str) or not isinstance(token_ids, list) or not token_ids:
        raise TypeError("context must be a string, and token_ids a list of at least one")
    for token in token_ids:
        _check_number(token, 0, "a token id")


def _check_number(value: object, least: int, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < MAX_NUMBER:
        raise ValueError(f"{what} is not an integer from {least} to {MAX_NUMBER - 1}")


def _summarize(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _write(path: Path, data: bytes) -> int:
    """Replace a file as a whole. There is no fsync: the checksum finds what a power cut leaves half-written."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp makes private files
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return len(data)


def _read_metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    try:
        metadata = json.loads(read_regular(path, MAX_METADATA))
    except FileNotFoundError as error:
        raise ChunkMiss(folder, "damaged", f"{METADATA} is missing, so writing was not finished") from error
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, numbers of many digits
        raise ChunkMiss(folder, "damaged", f"{METADATA} cannot be read ({_summarize(error)})") from error
    if not isinstance(metadata, dict):
        raise ChunkMiss(folder, "damaged", f"{METADATA} is not a JSON object")
    return metadata


def _check_identity(folder: Path, metadata: dict[str, Any], chunk: ChunkId, model: ModelFingerprint) -> None:
    version = metadata.get("version")
    if version != FORMAT_VERSION:
        found = repr(version)[:50]
        raise ChunkMiss(folder, "foreign", f"it has format version {found}, this package reads {FORMAT_VERSION}")
    stored = metadata.get("model")
    if not isinstance(stored, dict):
        raise ChunkMiss(folder, "damaged", f"{METADATA} does not say which model it is of")
    different = [name for name, value in asdict(model).items() if stored.get(name) != value]
    if different:
        raise ChunkMiss(folder, "foreign", f"it was computed by another model (different: {', '.join(different)})")
    expected = _metadata(chunk, model)
    for name, meaning in (
        ("context", "it was encoded after another prefix"),
        ("token_ids", "it holds other tokens"),
        ("num_tokens", "it holds another number of tokens"),
        ("key", "its key does not fit its content"),
        ("layout", "its tensors have another layout"),
    ):
        if metadata.get(name) != expected[name]:
            raise ChunkMiss(folder, "foreign", meaning)


def _read_tensor(folder: Path, name: str, metadata: dict[str, Any], num_bytes: int) -> torch.Tensor:
    """Read a file that should hold `num_bytes` of numbers. Raises ChunkMiss, before more than that is read."""
    files = metadata.get("files")
    entry = files.get(name) if isinstance(files, dict) else None
    if not isinstance(entry, dict):
        raise ChunkMiss(folder, "damaged", f"{METADATA} has no checksum of {name}")
    try:
        data = read_regular(folder / name, num_bytes + OVERHEAD)
    except OSError as error:
        raise ChunkMiss(folder, "damaged", f"{name} cannot be read ({error.strerror})") from error
    if len(data) != entry.get("bytes"):
        said = repr(entry.get("bytes"))[:50]
        raise ChunkMiss(folder, "damaged", f"{name} has {len(data)} bytes instead of {said}")
    if hashlib.sha256(data).hexdigest() != entry.get("sha256"):
        raise ChunkMiss(folder, "damaged", f"{name} does not have the content that was written (SHA-256 differs)")
    try:
        return read_tensor(data)
    except BadTensorFile as error:
        raise ChunkMiss(folder, "damaged", f"{name} cannot be used: {_summarize(error)}") from error
