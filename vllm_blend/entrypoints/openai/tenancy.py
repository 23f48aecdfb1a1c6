"""Tenants: which one an API key belongs to, and the salt that keeps its passages apart from everyone else's.

Keys are never logged and never appear in an error. A tenant's salt is derived from the first of its keys, so a tenant
keeps what it has stored while keys are added behind that one.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path

from vllm_blend.entrypoints.openai.errors import APIError
from vllm_blend.kv_store.owners import Owner

_PURPOSE = b"vllm-blend: salt of a tenant"
_LIMIT = re.compile(r"([a-z-]+)=([0-9]{1,15})")
_LIMITS = ("requests", "tokens_per_minute", "weight", "store_mib")
_NUMBERED = re.compile(r"key-[0-9]+")  # names of keys without one


@dataclass(frozen=True)
class Limits:
    """What a tenant may ask for: requests at a time, and tokens a minute, of prompts and answers. None: any number. Its
    weight beside other tenants; None: 1. And the MiB of stored passages that it may have in each tier; None: as many as
    there are."""

    requests: int | None = None
    tokens_per_minute: int | None = None
    weight: int | None = None
    store_mib: int | None = None


@dataclass(eq=False)
class Usage:
    """What a tenant has asked for. Tokens are a bucket that fills by the minute and holds those of one: a request is
    let in while there are any, and what it takes is counted as it comes, so that the bucket may be owed some."""

    clock: Callable[[], float] = time.monotonic
    num_requests: int = 0
    _tokens: float | None = None  # None: as many as it holds
    _updated: float = 0.0

    def enter(self, limits: Limits) -> None:
        """Count a request until `leave`. Raises APIError (429) if the tenant may not send one now."""
        if limits.requests is not None and self.num_requests >= limits.requests:
            raise _too_many(f"{limits.requests} of your requests run or wait, as many as may", "too_many_requests", 1)
        if limits.tokens_per_minute is not None:
            self._fill(limits.tokens_per_minute)
            assert self._tokens is not None
            if self._tokens <= 0:
                seconds = math.floor(-self._tokens * 60 / limits.tokens_per_minute) + 1
                raise _too_many(
                    f"you have used the {limits.tokens_per_minute} tokens that you may in a minute",
                    "too_many_tokens",
                    seconds,
                )
        self.num_requests += 1

    def leave(self) -> None:
        """Count a request that has `entered` no more."""
        self.num_requests -= 1

    def count(self, limits: Limits, num_tokens: int) -> None:
        """Count tokens of a prompt or of an answer."""
        if limits.tokens_per_minute is not None:
            self._fill(limits.tokens_per_minute)
            assert self._tokens is not None
            self._tokens -= num_tokens

    def _fill(self, per_minute: int) -> None:
        now = self.clock()
        more = (now - self._updated) * per_minute / 60
        self._tokens = per_minute if self._tokens is None else min(self._tokens + more, per_minute)
        self._updated = now


def _too_many(problem: str, code: str, seconds: int) -> APIError:
    message = f"{problem}: try again in {seconds} {'second' if seconds == 1 else 'seconds'}"
    return APIError(429, message, code=code, headers={"Retry-After": str(seconds)})


@dataclass(frozen=True)
class Tenant:
    """A user of the server. `name` may be logged."""

    name: str
    salt: str | None = field(default=None, repr=False)
    limits: Limits = Limits()
    usage: Usage = field(default_factory=Usage, repr=False, compare=False)

    @property
    def owner(self) -> Owner:
        """Return the tenant as the chunk store knows it."""
        mib = self.limits.store_mib
        return Owner(self.name, self.limits.weight or 1, None if mib is None else mib << 20)

    def combined_salt(self, cache_salt: str | None) -> str | None:
        """Return the salt of a request: the tenant's, and the request's own on top. None where there is neither."""
        if cache_salt == "":
            raise ValueError("cache_salt is empty: give a non-empty string, or leave it out")
        parts = [part for part in (self.salt, cache_salt) if part is not None]
        return "/".join(parts) or None  # a tenant's salt has a fixed length, so no two pairs look alike


ANYONE = Tenant("anyone")
CURRENT: ContextVar[Tenant] = ContextVar("tenant", default=ANYONE)  # whose request the task is about


class Tenants:
    """The keys of a server, and the tenants that they belong to. Without keys everyone is the same tenant."""

    def __init__(
        self, keys: Sequence[tuple[str | None, str]] = (), limits: Sequence[Limits] = (), before: Tenants | None = None
    ) -> None:
        """Take (tenant's name or None, key) pairs; a key without a name is a tenant of its own. `limits` has those of
        each key if there are any, of which a tenant has all. Tenants that were there `before` keep their salts, and
        what they have asked for still counts.

        Raises ValueError for a name that a tenant without one has, as the two would be one, and for limits of one
        tenant that differ.
        """
        known = [] if before is None else [tenant for _, tenant in before._tenants]
        # Names of keys without one are their numbers, which change when another line goes.
        salts = {each.name: each.salt for each in known if each.salt and not _NUMBERED.fullmatch(each.name)}
        usages = {each.salt: each.usage for each in known}
        self._tenants: list[tuple[bytes, Tenant]] = []
        given: dict[str, Limits] = {}
        for number, ((name, _), own) in enumerate(zip(keys, limits, strict=False), start=1):
            name = f"key-{number}" if name is None else name
            given[name] = _merged(name, given.get(name, Limits()), own)
        for number, (name, key) in enumerate(keys, start=1):
            if name is not None and (name == ANYONE.name or _NUMBERED.fullmatch(name)):
                raise ValueError(f"api_keys: the tenant's name {name!r} is that of a key without a name: use another")
            name = f"key-{number}" if name is None else name
            salt = salts.setdefault(name, hmac.new(key.encode(), _PURPOSE, hashlib.sha256).hexdigest())
            usage = usages.setdefault(salt, Usage())
            self._tenants.append((_digest(key), Tenant(name, salt, given.get(name, Limits()), usage)))

    @classmethod
    def from_options(cls, keys: Sequence[str] | None, path: str | None, before: Tenants | None = None) -> Tenants:
        """Return the tenants of `--api-key` and of the file `--api-keys`. Raises ValueError that says what is wrong."""
        pairs: list[tuple[str | None, str]] = [(None, key) for key in keys or ()]
        limits = [Limits()] * len(pairs)
        for name, key, own in [] if path is None else read_keys(Path(path)):
            pairs.append((name, key))
            limits.append(own)
        if not all(key for _, key in pairs):
            raise ValueError("api_key holds an empty key: remove it")
        if not all(key.isascii() and key.isprintable() for _, key in pairs):
            raise ValueError("an API key has characters that no HTTP header can bring: use printable ASCII")
        if len({key for _, key in pairs}) != len(pairs):
            raise ValueError("an API key is given twice: every key belongs to one tenant, remove one of them")
        return cls(pairs, limits, before)

    def replace(self, others: Tenants) -> None:
        """Take the keys of others in place of those before: requests that run keep what they have."""
        self._tenants = others._tenants

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


def read_keys(path: Path) -> list[tuple[str | None, str, Limits]]:
    """Return what a file of keys says: a key, or a tenant's name and a key, on every line, and limits after it; #
    begins a comment line.

    Raises ValueError naming the line, never its content.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"api_keys: {path} cannot be read ({type(error).__name__}): give a text file") from error
    pairs: list[tuple[str | None, str, Limits]] = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        limits = Limits()
        while len(words) > 1 and (found := _LIMIT.fullmatch(words[-1])):
            name, value = found[1].replace("-", "_"), int(found[2])
            if name not in _LIMITS or value == 0:
                raise ValueError(
                    f"api_keys: line {number} of {path} has the limit {found[0]!r}: write requests=N, "
                    "tokens-per-minute=N, weight=N or store-mib=N, with N from 1 on"
                )
            limits = _merged(f"line {number}", limits, Limits(**{name: value}))
            words.pop()
        if len(words) > 2:
            raise ValueError(
                f"api_keys: line {number} of {path} has {len(words)} words: write KEY, or TENANT KEY, and limits such "
                "as requests=8 tokens-per-minute=60000 after that"
            )
        pairs.append((words[0] if len(words) == 2 else None, words[-1], limits))
    if not pairs:
        raise ValueError(f"api_keys: {path} has no key: write one on every line, or leave the option out")
    return pairs


def _merged(name: str, first: Limits, second: Limits) -> Limits:
    """Return all limits of a tenant. Raises ValueError if one is given twice."""
    values = {each: getattr(second, each) for each in _LIMITS if getattr(second, each) is not None}
    for each, value in values.items():
        if getattr(first, each) not in (None, value):
            raise ValueError(f"api_keys: {name} has the limit {each.replace('_', '-')} twice: give it once")
    return replace(first, **values)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
