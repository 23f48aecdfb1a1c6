"""Signatures of stored chunks: permission to write to a shared store is not enough to replace a prompt's KV.

A chunk's header is signed, with its key, its model and a checksum of every layer in it. The checksums are made with the
secret as well: those of unsigned chunks are quick, but anyone can make other numbers that have them.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

SIGNATURE_BYTES = 32
MIN_SECRET_BYTES = 32


@dataclass(frozen=True)
class ChunkSigner:
    """Signs chunks with a secret, and checks them. Raises ValueError if the secret is short."""

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) < MIN_SECRET_BYTES:
            raise ValueError(
                f"the secret that chunks are signed with has {len(self.secret)} bytes: give at least "
                f"{MIN_SECRET_BYTES}, for example those of `openssl rand -hex 32`"
            )

    @classmethod
    def from_file(cls, path: str | Path) -> ChunkSigner:
        """Return a signer with the secret in a file, without white space at its ends. Raises ValueError if it is short,
        and OSError if it cannot be read."""
        return cls(Path(path).read_bytes().strip())

    def signature(self, header: bytes) -> bytes:
        return hmac.digest(self._header_key, header, "sha256")

    def is_valid(self, header: bytes, signature: bytes) -> bool:
        """Return whether a signature is that of a header, in a time that does not depend on how much of it is right."""
        return hmac.compare_digest(self.signature(header), signature)

    def folder_signature(self, metadata: bytes) -> str:
        """Return the signature of what an exported folder says of itself, its files' checksums included, as hex
        digits."""
        return hmac.digest(self._folder_key, metadata, "sha256").hex()

    def layer_checksum(self, layer: memoryview) -> int:
        """Return the checksum of a layer, 64 bits."""
        return int.from_bytes(hashlib.blake2b(layer, digest_size=8, key=self._layer_key).digest(), "little")

    @cached_property
    def _header_key(self) -> bytes:
        return hmac.digest(self.secret, b"vllm-blend: headers of chunks", "sha256")

    @cached_property
    def _folder_key(self) -> bytes:
        return hmac.digest(self.secret, b"vllm-blend: folders of chunks", "sha256")

    @cached_property
    def _layer_key(self) -> bytes:
        return hmac.digest(self.secret, b"vllm-blend: layers of chunks", "sha256")
