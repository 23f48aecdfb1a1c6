"""One way into every family's registry: rules that users choose, and add to, by name."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def enter(registry: dict[str, type[T]], kind: str, rule: type[T]) -> type[T]:
    """Make `rule` usable by its class attribute `name`. Raises ValueError where it has none, or another rule has it."""
    name = getattr(rule, "name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"{rule.__name__} needs a class attribute `name`: it is what users select it by")
    known = registry.get(name)
    if known is not None and known is not rule:
        raise ValueError(f"a {kind} named {name!r} is registered already ({known.__name__}): choose another name")
    registry[name] = rule
    return rule
