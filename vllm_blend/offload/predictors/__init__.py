"""Which chunks the next steps need: one file per rule, one registry of all."""

from __future__ import annotations

from vllm_blend.offload.predictors.attention_mass import AttentionMass
from vllm_blend.offload.predictors.base import Evidence, LooksAt, PromotionPredictor
from vllm_blend.offload.predictors.draft_union import DraftUnion
from vllm_blend.offload.predictors.query_digest import QueryDigest
from vllm_blend.offload.predictors.retrieval_rank import RetrievalRank
from vllm_blend.registry import enter

PREDICTORS: dict[str, type[PromotionPredictor]] = {}


def register_predictor(predictor: type[PromotionPredictor]) -> type[PromotionPredictor]:
    """Make a predictor usable by its `name`. Works as a decorator on a user's own class."""
    return enter(PREDICTORS, "predictor", predictor)


def make_predictor(name: str) -> PromotionPredictor:
    """The predictor registered as `name`, with its default settings. Raises ValueError listing the known ones."""
    if name not in PREDICTORS:
        raise ValueError(
            f"offload_predictor={name!r} is unknown: use one of {sorted(PREDICTORS)}, or register your own"
        )
    return PREDICTORS[name]()


for _predictor in (RetrievalRank, QueryDigest, AttentionMass, DraftUnion):
    register_predictor(_predictor)

__all__ = ["PREDICTORS", "Evidence", "LooksAt", "PromotionPredictor", "make_predictor", "register_predictor"]
