"""Typed access to the metadata of a GGUF file, with errors that name the entry."""

from __future__ import annotations

import math
from typing import Any

from vllm_blend.checks import is_number, is_whole
from vllm_blend.models.gguf.header import GGUFHeader


class UnfitFile(Exception):
    """Why there is no config for a file."""


class Metadata:
    """The metadata of a file's own architecture, by names without it."""

    def __init__(self, header: GGUFHeader, architecture: str) -> None:
        self._found, self._prefix = header.metadata, f"{architecture}."

    def full_name(self, name: str) -> str:
        return self._prefix + name

    def get(self, name: str) -> Any:
        return self._found.get(self._prefix + name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not is_whole(value) or value < 1:
            raise UnfitFile(f"{self._prefix}{name} is {shown(value)}, where a positive whole number is needed")
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if not is_number(value) or not 0 < value < float("inf"):
            raise UnfitFile(f"{self._prefix}{name} is {shown(value)}, where a positive number is needed")
        return float(f"{value:.7g}")  # float32 in the file: 1e-06 as it was meant

    def refuse(self, name: str, *fine: Any) -> None:
        """Raise UnfitFile for an entry that would change the model, unless its value is one of `fine`."""
        value = self.get(name)
        if value is not None and not any(_equal(value, each) for each in fine):
            raise UnfitFile(f"{self._prefix}{name} is {shown(value)}, which is not supported here")


def shown(value: Any) -> str:
    return "missing" if value is None else repr(value)[:80]


def _equal(value: Any, other: Any) -> bool:
    """Return whether a file's value is another one, which has been float32 if it is a number."""
    if is_number(value) and is_number(other):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other)
