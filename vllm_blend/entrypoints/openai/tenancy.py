"""Tenants: which one an API key belongs to, and the salt that keeps its passages apart from everyone else's.

Keys are never logged and never appear in an error. A tenant's salt is derived from the first of its keys, so a tenant
keeps what it has stored while keys are added behind that one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vllm_blend.entrypoints.openai.errors import APIError

_PURPOSE = b"vllm-blend: salt of a tenant"
_NUMBERED = re.compile(r"key-[0-9]+")  # names of keys without one


@dataclass(frozen=True)
class Tenant:
    """A user of the server. `name` may be logged."""

    name: str
    salt: str | None = field(default=None, repr=False)

    def combined_salt(self, cache_salt: str | None) -> str | None:
        """Return the salt of a request: the tenant's, and the request's own on top. None where there is neither."""
        if cache_salt == "":
            raise ValueError("cache_salt is empty: give a non-empty string, or leave it out")
        parts = [part for part in (self.salt, cache_salt) if part is not None]
        return "/".join(parts) or None  # a tenant's salt has a fixed length, so no two pairs look alike


ANYONE = Tenant("anyone")


class Tenants:
    """The keys of a server, and the tenants that they belong to. Without keys everyone is the same tenant."""

    def __init__(self, keys: Sequence[tuple[str | None, str]] = ()) -> None:
        """Take (tenant's name or None, key) pairs; a key without a name is a tenant of its own. Raises ValueError for a
        name that such a tenant has, as the two would be one."""
        salts: dict[str, str] = {}
        self._tenants: list[tuple[bytes, Tenant]] = []
        for number, (name, key) in enumerate(keys, start=1):
            if name is not None and (name == ANYONE.name or _NUMBERED.fullmatch(name)):
                raise ValueError(f"api_keys: the tenant's name {name!r} is that of a key without a name: use another")
            name = f"key-{number}" if name is None else name
            salt = salts.setdefault(name, hmac.new(key.encode(), _PURPOSE, hashlib.sha256).hexdigest())
            self._tenants.append((_digest(key), Tenant(name, salt)))

    @classmethod
    def from_options(cls, keys: Sequence[str] | None, path: str | None) -> Tenants:
        """Return the tenants of `--api-key` and of the file `--api-keys`. Raises ValueError that says what is wrong."""
        pairs: list[tuple[str | None, str]] = [(None, key) for key in keys or ()]
        if path is not None:
            pairs += read_keys(Path(path))
        if not all(key for _, key in pairs):
            raise ValueError("api_key holds an empty key: remove it")
        if not all(key.isascii() and key.isprintable() for _, key in pairs):
            raise ValueError("an API key has characters that no HTTP header can bring: use printable ASCII")
        if len({key for _, key in pairs}) != len(pairs):
            raise ValueError("an API key is given twice: every key belongs to one tenant, remove one of them")
        return cls(pairs)

    def authenticate(self, headers: Mapping[str, str]) -> Tenant:
        """Return the tenant whose key a request brings, as `Authorization: Bearer KEY` or `x-api-key: KEY`.

        Every key is compared, each in constant time. Raises APIError (401).
        """
        if not self._tenants:
            return ANYONE
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        found = [tenant for own, tenant in self._tenants if hmac.compare_digest(own, digest)]
        if not found:
            problem = "the API key is not one of this server's" if given else "there is no API key in the request"
            raise APIError(
                401,
                f"{problem}: send Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found[0]


def read_keys(path: Path) -> list[tuple[str | None, str]]:
    """Return what a file of keys says: a key, or a tenant's name and a key, on every line; # begins a comment line.

    Raises ValueError naming the line, never its content.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_keys: {path} cannot be read ({type(error).__name__}): give a text file") from error
    pairs: list[tuple[str | None, str]] = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise ValueError(f"api_keys: line {number} of {path} has {len(words)} words: write KEY, or TENANT KEY")
        pairs.append((words[0] if len(words) == 2 else None, words[-1]))
    if not pairs:
        raise ValueError(f"api_keys: {path} has no key: write one on every line, or leave the option out")
    return pairs


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
