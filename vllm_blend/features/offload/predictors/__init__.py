"""Predictors of the chunks that the next steps need: one file per rule, one registry of all."""

from __future__ import annotations

from vllm_blend.features.offload.predictors.base import PromotionEvidence, PromotionPredictor
from vllm_blend.features.offload.predictors.query_digest import QueryDigest
from vllm_blend.features.offload.predictors.retrieval_rank import RetrievalRank
from vllm_blend.registry import Registry

PREDICTORS: Registry[type[PromotionPredictor]] = Registry(
    "predictor", "offload_predictor", (RetrievalRank, QueryDigest)
)
register_predictor = PREDICTORS.register  # as a decorator, it makes a class of your own usable by its `name`


def make_predictor(name: str) -> PromotionPredictor:
    """Return the predictor registered as `name`, with default settings. Raises ValueError listing the known ones."""
    return PREDICTORS.find(name)()


__all__ = ["PREDICTORS", "PromotionEvidence", "PromotionPredictor", "make_predictor", "register_predictor"]
