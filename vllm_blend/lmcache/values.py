"""Check the values of a configuration when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml


class Values(dict[str, Any]):
    """Settings by name, without those that are null. A wrong value is a ValueError that names `source`, the setting and
    the fix."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        super().__init__({key: value for key, value in values.items() if value is not None})
        self.source, self.nulls = source, frozenset(values.keys() - self.keys())

    def error(self, key: str, problem: str) -> ValueError:
        return ValueError(f"{self.source}: {key}={self[key]!r} {problem}")

    def contradiction(self, first: str, second: str) -> ValueError:
        return ValueError(
            f"{self.source}: {first}={self[first]!r} and {second}={self[second]!r} contradict each other: keep one of "
            "them"
        )

    @contextmanager
    def naming_source(self) -> Iterator[None]:
        """Put the source in front of errors that name only the setting."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from error

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "must be true or false")
        return value

    def integer(self, key: str, low: int) -> int | None:
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise self.error(key, f"must be a whole number, at least {low}")
        return value

    def number(self, key: str, low: float | None = None) -> float | None:
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise self.error(key, "must be a number")
        if value is not None and low is not None and not low <= value < float("inf"):
            raise self.error(key, f"must be a finite number, at least {low:g}")
        return value

    def numbers(self, key: str) -> list[Any] | None:
        """Return the numbers of a setting: one number, a list of numbers, or a text such as "1, 2"."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, str):
            try:
                value = [yaml.safe_load(part) for part in value.split(",")] if value.strip() else []
            except yaml.YAMLError:
                value = []
        found = value if isinstance(value, list) else [value]
        if not found or any(isinstance(each, bool) or not isinstance(each, (int, float)) for each in found):
            raise self.error(key, "must be a number or a list of numbers")
        return found

    def text(self, key: str) -> str | None:
        value = self.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(key, "must be a text: put it in quotes, or leave it out")
        return value

    def folder(self, key: str) -> str | None:
        """Return a path. It may be given as a URL: file:///var/cache, or, as LMCache reads it, file://cache for a
        relative path."""
        path = self.text(key)
        if path is None:
            return None
        path = path.removeprefix("file://")
        if not path or "://" in path:
            raise self.error(
                key, "is not a folder of this machine: use a path, or a URL such as file:///var/cache/lmcache/"
            )
        return path
