"""Drafters, which guess the next tokens: one file per rule, one registry of all."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from vllm_blend.features.spec_decode.drafters.base import Drafter, History
from vllm_blend.features.spec_decode.drafters.ngram import NGram
from vllm_blend.features.spec_decode.drafters.suffix import Suffix
from vllm_blend.registry import Registry

DRAFTERS: Registry[type[Drafter]] = Registry("drafter", "speculative_config: method", (NGram, Suffix))
register_drafter = DRAFTERS.register  # as a decorator, it makes a class of your own usable by its `name`


def make_drafter(method: str, **settings: Any) -> Drafter:
    """Return the drafter registered as `method`, with those settings that are not None.

    Raises ValueError listing the known methods, or naming a setting that the method does not have.
    """
    drafter = DRAFTERS.find(method)
    given = {name: value for name, value in settings.items() if value is not None}
    own = {item.name for item in fields(drafter)}  # type: ignore[arg-type]
    for name in given:
        if name not in own:
            raise ValueError(
                f"speculative_config: {name} is not a setting of method={method!r}: leave it out, or use another method"
            )
    return drafter(**given)


__all__ = ["DRAFTERS", "Drafter", "History", "NGram", "Suffix", "make_drafter", "register_drafter"]
