"""Registries: what users choose by name, such as selectors and eviction metrics, and add to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from vllm_blend.checks import closest

T = TypeVar("T")


class Registry(dict[str, T]):
    """What there is of a `kind`, by name. Users choose with `option`, whose errors `find` words.

    `entries` are registered by their `name`, or under the names that a mapping gives. `aliases` are names that the
    option takes too, with what they stand for: no entry may have them.
    """

    def __init__(
        self,
        kind: str,
        option: str,
        entries: Iterable[T] | Mapping[str, T] = (),
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.kind, self.option, self.aliases = kind, option, dict(aliases or {})
        if isinstance(entries, Mapping):
            self.update(entries)
        else:
            for entry in entries:
                self.register(entry)

    def register(self, entry: T) -> T:
        """Make an entry usable by its attribute `name`; works as a decorator of a class.

        Raises ValueError if it has no name, or another entry has that name.
        """
        name, own_name = getattr(entry, "name", None), getattr(entry, "__name__", repr(entry))
        if not isinstance(name, str) or not name:
            raise ValueError(f"{own_name} needs a class attribute `name`: it is what users select it by")
        if name in self.aliases:
            raise ValueError(
                f"{own_name} cannot be named {name!r}: that stands for {self.aliases[name]!r}; choose another name"
            )
        known = self.get(name)
        if known is not None and known is not entry:
            raise ValueError(
                f"a {self.kind} named {name!r} is registered already ({getattr(known, '__name__', known)}): choose "
                "another name"
            )
        self[name] = entry
        return entry

    def find(self, name: Any) -> T:
        """Return the entry called `name`. Raises ValueError that lists the known names."""
        if not isinstance(name, str) or name not in self:
            raise ValueError(f"{self.option}={name!r} is unknown: {self.advice(name)}")
        return self[name]

    def names(self) -> list[str]:
        """Return what the option takes."""
        return [*self.aliases, *sorted(self)]

    def advice(self, name: Any) -> str:
        """Return what to give instead of an unknown name."""
        meant = closest(name, self.names())
        return f"use one of {self.names()}, or register your own" + (f"; did you mean {meant!r}?" if meant else "")
