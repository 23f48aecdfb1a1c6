"""Engines that tests share: the last two stay, since a test may compare them many times. More take too much memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from tests import memory

MOST = 2

_kept: OrderedDict[Hashable, Any] = OrderedDict()


def drop_all() -> None:
    """Give the memory of all of them back."""
    _kept.clear()
    memory.collect()


def kept(key: Hashable, build: Callable[[], Any]) -> Any:
    """Return what has been built for this key, or build it once those that were used least recently have made room.

    Dropped engines are in reference cycles. They are freed here and not only after the test: one test may ask for many.
    """
    if key in _kept:
        _kept.move_to_end(key)
        return _kept[key]
    while len(_kept) >= MOST:
        _kept.popitem(last=False)
    memory.free_dropped()
    _kept[key] = build()
    return _kept[key]
