"""`vllm.logprobs`."""

from __future__ import annotations

from typing import Any

from vllm_blend.outputs import Logprob


class FlatLogprobs:
    """vLLM's compact log-probabilities, for `isinstance` only: outputs always hold lists of dicts here."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        raise NotImplementedError("FlatLogprobs is not supported: log-probabilities are lists of dicts")


__all__ = ["FlatLogprobs", "Logprob"]
