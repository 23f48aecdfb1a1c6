"""Values of a configuration, checked when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml


class Values(Mapping[str, Any]):
    """Settings by name, without those that are null. Whatever is wrong is a ValueError that names `source`, the setting
    and the fix."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self._values = {key: value for key, value in values.items() if value is not None}
        self.nulls = frozenset(values.keys() - self._values.keys())

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def error(self, key: str, problem: str) -> ValueError:
        return ValueError(f"{self.source}: {key}={self[key]!r} {problem}")

    def contradiction(self, first: str, second: str) -> ValueError:
        return ValueError(
            f"{self.source}: {first}={self[first]!r} and {second}={self[second]!r} contradict each other: keep one of "
            "them"
        )

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put the source in front of errors that name the setting only."""
        try:
            yield
        except ValueError as error:
            raise ValueError(f"{self.source}: {error}") from error

    def flag(self, key: str) -> bool | None:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.error(key, "is no truth value: use true or false")
        return value

    def integer(self, key: str, low: int) -> int | None:
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
            raise self.error(key, f"is no whole number from {low} on")
        return value

    def number(self, key: str, low: float | None = None) -> float | None:
        value = self.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise self.error(key, "is no number")
        if value is not None and low is not None and not low <= value < float("inf"):
            raise self.error(key, f"must be a number from {low:g} on")
        return value

    def numbers(self, key: str) -> list[Any] | None:
        """A number, a list of numbers, or a text such as "1, 2"."""
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
        """A path, or a URL of a folder: file:///var/cache, and as LMCache reads it file://cache for a relative one."""
        path = self.text(key)
        if path is None:
            return None
        path = path.removeprefix("file://")
        if not path or "://" in path:
            raise self.error(
                key, "is no folder of this machine: use a path, or a URL such as file:///var/cache/lmcache/"
            )
        return path
