"""Check that recomputing everything is full prefill, to rounding: otherwise no other ratio of a model can be judged.

If it is not, three more comparisons say where to look: the same prompt twice, the same prompt in pieces, and a chunk
that is placed exactly where it was encoded.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_blend.inputs import PromptType
from vllm_blend.quality.questions import Questions, joined_ids
from vllm_blend.quality.session import Following, Session, Truth
from vllm_blend.quality.settings import EVERYTHING, PLAIN_REUSE

NUM_QUESTIONS = 4
PIECE = 32  # tokens of a prompt in a step, when it is computed in pieces


NOT_DETERMINISTIC = (
    "The model is not deterministic: the same prompts gave different answers the second time. Look for dropout or "
    "noise in its forward pass, weights that were never loaded, and kernels whose sums depend on the batch."
)
DEPENDS_ON_STEPS = (
    "The model's answer depends on how a prompt is cut into steps, so a token's state depends on more than the tokens "
    "up to it. Look for positions that count from the step's first token instead of the prompt's, a RoPE that depends "
    "on the prompt's length (it must be one for the whole model), attention that is not causal, and state that is kept "
    "outside the KV cache."
)
WRONG_WHERE_PLACED = (
    "A chunk that is placed exactly where it was encoded is not what full prefill computes there: its KV is stored or "
    "placed wrongly. K is stored before RoPE and rotated when it is placed. Look for a wrong RoPE: the "
    "model must apply what `self_attn.attn.rotary.cos_sin` returns (base, scaling, layer type); and for K or V "
    "that are changed after they were stored."
)
WRONG_ELSEWHERE = (
    "Prompts in pieces are right, and so are chunks where they were encoded, but the combination is wrong. Look for "
    "K and V of recomputed tokens that do not end up where the reused ones were."
)


# The KL that rounding may make, in nats a token, as the mean over the questions. On real models it made less than a
# quarter of that. The share of equal answers does not tell an error from rounding: in bfloat16, rounding alone changes
# the long answers of a model that is unsure.
LIMITS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Difference:
    """The difference between full prefill and another way to compute the same answers."""

    what: str
    kl: float
    same: float

    @classmethod
    def of(cls, what: str, followings: Sequence[Following]) -> Difference:
        kl = statistics.fmean(statistics.fmean(each.kl) for each in followings)
        return cls(what, kl, statistics.fmean(each.agrees for each in followings))

    def within(self, limit: float) -> bool:
        return self.kl <= limit  # not with NaN

    def __str__(self) -> str:
        return f"{self.what}: KL {self.kl:.1e} nats, {100 * self.same:.0f}% of the answers equal"


@dataclass(frozen=True)
class Check:
    """Full prefill's answers to a few questions, the comparisons with them, and the limit of the model's dtype. If any
    comparison exceeds the limit, the last one does. Prompts are kept in chunks and plain."""

    chunked: list[Any]
    plain: list[PromptType]
    truths: list[Truth]
    found: list[Difference]
    limit: float

    @property
    def passes(self) -> bool:
        return all(difference.within(self.limit) for difference in self.found)


def check_exactness(session: Session, questions: Questions, count: int = NUM_QUESTIONS) -> Check:
    """Compare ways to answer the first `count` questions that must give the same."""
    assert questions.asking is not None
    limit = LIMITS[session.dtype]
    chunked: list[Any] = [questions.prompt(sample) for sample in questions.samples[:count]]
    plain: list[PromptType] = [{"prompt_token_ids": joined_ids(session.engine, prompt)} for prompt in chunked]
    max_tokens = questions.asking.max_tokens
    truths = session.truths(plain, max_tokens)
    found = [Difference.of("full prefill, twice", session.follow(plain, truths))]
    if found[-1].within(limit):
        session.encode(chunked)
        everything = session.follow([prompt | {"blend_selector": EVERYTHING} for prompt in chunked], truths)
        found.append(Difference.of("everything recomputed, against full prefill", everything))
    if len(found) == 2 and not found[-1].within(limit):
        found.append(_first_chunk(session, chunked, max_tokens))
    session.engine.composer.store.clear()  # so that what chunks take is counted when settings are measured
    return Check(chunked, plain, truths, found, limit)


def explain(model: str, check: Check, **engine_args: Any) -> str:
    """Return why a model failed a check, and the comparisons. It starts another engine, so the first must be gone."""
    if not check.found[0].within(check.limit):
        return _list_differences(NOT_DETERMINISTIC, check.found)
    with Session(model, batch=1, **engine_args | {"max_num_batched_tokens": PIECE}) as session:
        followings = session.follow(check.plain, check.truths)
    pieces = Difference.of(f"full prefill, {PIECE} tokens at a time", followings)
    if not pieces.within(check.limit):
        reason = DEPENDS_ON_STEPS
    else:
        reason = WRONG_WHERE_PLACED if not check.found[-1].within(check.limit) else WRONG_ELSEWHERE
    return _list_differences(reason, [*check.found, pieces])


def _list_differences(reason: str, differences: Sequence[Difference]) -> str:
    return "\n".join([reason, *(f"  {difference}" for difference in differences)])


def _first_chunk(session: Session, prompts: Sequence[Any], max_tokens: int) -> Difference:
    """Compare prompts of one chunk, which stands where it was encoded: reused as it is, it is what full prefill
    computes."""
    chunked = [prompt | {"chunks": prompt["chunks"][:1], "blend_selector": PLAIN_REUSE} for prompt in prompts]
    plain: list[PromptType] = [{"prompt_token_ids": joined_ids(session.engine, prompt)} for prompt in chunked]
    truths = session.truths(plain, max_tokens)
    followings = session.follow(chunked, truths)
    return Difference.of("one chunk, reused where it was encoded, against full prefill", followings)
