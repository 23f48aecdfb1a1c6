"""Guesses of what comes next: one file per rule, one registry of all."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm_blend.registry import enter
from vllm_blend.spec_decode.drafters.base import Drafter, History
from vllm_blend.spec_decode.drafters.ngram import NGram
from vllm_blend.spec_decode.drafters.suffix import Suffix

DRAFTERS: dict[str, type[Drafter]] = {}


def register_drafter(drafter: type[Drafter]) -> type[Drafter]:
    """Make a drafter usable by its `name`. Works as a decorator on a user's own class."""
    return enter(DRAFTERS, "drafter", drafter)


def make_drafter(method: str, **settings: Any) -> Drafter:
    """The drafter registered as `method`, with those settings that are not None.

    Raises ValueError listing the known methods, or naming a setting that the method does not have.
    """
    if method not in DRAFTERS:
        raise ValueError(
            f"speculative_config: method={method!r} is unknown: use one of {sorted(DRAFTERS)}, or register your own"
        )
    drafter = DRAFTERS[method]
    given = {name: value for name, value in settings.items() if value is not None}
    own = {item.name for item in fields(drafter)}  # type: ignore[arg-type]
    for name in given:
        if name not in own:
            raise ValueError(
                f"speculative_config: {name} is no setting of method={method!r}: leave it out, or use another method"
            )
    return drafter(**given)


for _drafter in (NGram, Suffix):
    register_drafter(_drafter)

__all__ = ["DRAFTERS", "Drafter", "History", "NGram", "Suffix", "make_drafter", "register_drafter"]
