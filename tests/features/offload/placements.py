"""Placements that are the same in every run: chunks move at once, and for reasons that no rounding touches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from tests.engine.engines import feature
from vllm_blend import LLM
from vllm_blend.features.offload.copies import BlockCopies, StreamCopies
from vllm_blend.features.offload.extension import ChunkOffload
from vllm_blend.features.offload.predictors import PREDICTORS, PromotionEvidence, PromotionPredictor, register_predictor


def move_at_once(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    """Copies and scores of this engine, which must not run ahead, are there when they are asked for: on a CPU they
    always are, and on a GPU they otherwise arrive when its link and its other work let them."""
    inner = llm.llm_engine
    offload = feature(inner, ChunkOffload)
    assert not inner.loop.runs_ahead, "moves are planned in a thread where steps are queued ahead"
    patch.setattr(offload.scheduler, "copies", _AtOnce(offload.scheduler.copies))
    scorer = offload.scorer
    score = scorer._score

    def scored(residency: Any, memory: Any, *rest: Any) -> None:
        score(residency, memory, *rest)
        _wait_for(scorer.caches[0].key.device)
        scorer._collect(residency, memory)

    patch.setattr(scorer, "_score", scored)


class _AtOnce:
    """Every copy is over when `submit` returns."""

    def __init__(self, copies: BlockCopies) -> None:
        self.copies = copies

    def submit(self, *arguments: Any) -> Any:
        ticket = self.copies.submit(*arguments)
        if isinstance(self.copies, StreamCopies):
            self.copies.stream.synchronize()
        return ticket


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class TakesTurns(PromotionPredictor):
    """Wants another chunk after each step, by rank. It is shown digests, as predictors are that use queries, and keeps
    what they say, but goes by the number of steps alone: two engines that round differently place alike."""

    name: ClassVar[str] = "takes_turns"
    uses_queries: ClassVar[bool] = True
    expected: ClassVar[list[torch.Tensor]] = []  # [rows, chunks] of every score so far

    def score(self, evidence: PromotionEvidence) -> torch.Tensor:
        assert evidence.expected_mass is not None
        self.expected.append(evidence.expected_mass.cpu())
        return -evidence.ranks.float() if evidence.previous is None else evidence.previous.roll(1)


@contextmanager
def taking_turns() -> Iterator[type[TakesTurns]]:
    """The predictor under its name."""
    register_predictor(TakesTurns)
    TakesTurns.expected.clear()
    try:
        yield TakesTurns
    finally:
        del PREDICTORS[TakesTurns.name]
