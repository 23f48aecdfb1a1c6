"""Placements that are the same in every run: chunks move at once, and for reasons that no rounding touches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch

from vllm_blend import LLM
from vllm_blend.offload.copies import BlockCopies, StreamCopies
from vllm_blend.offload.predictors import PREDICTORS, Evidence, LooksAt, PromotionPredictor, register_predictor


def move_at_once(llm: LLM, patch: pytest.MonkeyPatch) -> None:
    """Copies and scores of this engine, which must not run ahead, are there when they are asked for: on a CPU they
    always are, and on a GPU they otherwise arrive when its link and its other work let them."""
    inner = llm.llm_engine
    assert inner.offload is not None
    assert not inner.async_scheduling, "moves are planned in a thread where steps are queued ahead"
    patch.setattr(inner.offload.scheduler, "copies", _AtOnce(inner.offload.scheduler.copies))
    scorer = inner.offload.scorer
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


class FollowsDrafts(PromotionPredictor):
    """The chunk that drafts come from first, then by rank. It is shown digests, as predictors are that look at queries,
    and keeps what they say, but goes by tokens alone: two engines that round differently place alike."""

    name: ClassVar[str] = "follows_drafts"
    looks_at: ClassVar[LooksAt] = LooksAt.DIGESTS
    expected: ClassVar[list[torch.Tensor]] = []  # [rows, chunks] of every score so far

    def score(self, evidence: Evidence) -> torch.Tensor:
        assert evidence.expected_mass is not None
        self.expected.append(evidence.expected_mass.cpu())
        scores = -evidence.ranks.float()
        if evidence.draft_source is not None:
            scores[evidence.draft_source] = 1.0
        return scores


@contextmanager
def following_drafts() -> Iterator[type[FollowsDrafts]]:
    """The predictor under its name."""
    register_predictor(FollowsDrafts)
    FollowsDrafts.expected.clear()
    try:
        yield FollowsDrafts
    finally:
        del PREDICTORS[FollowsDrafts.name]
