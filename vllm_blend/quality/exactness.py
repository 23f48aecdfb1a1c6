"""Check that recomputing everything is full prefill, to rounding: otherwise no other ratio of a model can be judged.

If it is not, three more comparisons say where to look: the same prompt twice, the same prompt in pieces, and a chunk
that is placed exactly where it was encoded.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_blend.inputs import PromptType
from vllm_blend.quality.questions import Questions, joined_ids
from vllm_blend.quality.session import Answers, Session
from vllm_blend.quality.settings import RECOMPUTE_ALL, Run
from vllm_blend.quality.sweep import blended_answers, full_answers, kl_divergence

NUM_QUESTIONS = 8
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


@dataclass(frozen=True)
class Limit:
    """The difference that rounding may make. On the demo model it makes far less: see the tests."""

    kl: float  # nats, of the first token, mean over the questions
    same: float  # share of answers that are word for word the same


LIMITS = {
    torch.float32: Limit(1e-5, 0.99),
    torch.float16: Limit(1e-3, 0.75),
    torch.bfloat16: Limit(1e-2, 0.75),
}


@dataclass(frozen=True)
class Difference:
    """The difference between two ways to compute the same answers."""

    what: str
    kl: float
    same: float

    @classmethod
    def between(cls, what: str, expected: Answers, found: Answers) -> Difference:
        pairs = list(zip(expected.answers, found.answers, strict=True))
        kl = statistics.fmean(kl_divergence(a.first, b.first) for a, b in pairs)
        return cls(what, kl, statistics.fmean(a.token_ids == b.token_ids for a, b in pairs))

    def within(self, limit: Limit) -> bool:
        return self.kl <= limit.kl and self.same >= limit.same  # with NaN, neither holds

    def __str__(self) -> str:
        return f"{self.what}: KL {self.kl:.1e} nats, {100 * self.same:.0f}% of the answers equal"


def check_exactness(session: Session, questions: Questions) -> tuple[Answers, list[Difference], Limit]:
    """Return full prefill's answers to the first few questions, the comparisons made, and the limit of the model's
    dtype. If any comparison exceeds the limit, the last one does."""
    few = replace(questions, samples=questions.samples[:NUM_QUESTIONS])
    limit = LIMITS[session.dtype]
    full = full_answers(session, few, few.samples)
    found = [Difference.between("full prefill, twice", full, full_answers(session, few, few.samples))]
    if found[-1].within(limit):
        everything = blended_answers(session, few, few.samples, Run(RECOMPUTE_ALL, 1.0))
        found.append(Difference.between("everything recomputed, against full prefill", full, everything))
    if len(found) == 2 and not found[-1].within(limit):
        found.append(_first_chunk(session, few))
    return full, found, limit


def explain(
    model: str, questions: Questions, full: Answers, found: Sequence[Difference], limit: Limit, **engine_args: Any
) -> str:
    """Return why a model failed `check_exactness`, and the comparisons. It starts another engine, so the first must be
    gone."""
    if not found[0].within(limit):
        return _list_differences(NOT_DETERMINISTIC, found)
    few = questions.samples[: len(full.answers)]
    with Session(model, batch=1, **engine_args | {"max_num_batched_tokens": PIECE}) as session:
        pieces = Difference.between(
            f"full prefill, {PIECE} tokens at a time", full, full_answers(session, questions, few)
        )
    if not pieces.within(limit):
        reason = DEPENDS_ON_STEPS
    else:
        reason = WRONG_WHERE_PLACED if not found[-1].within(limit) else WRONG_ELSEWHERE
    return _list_differences(reason, [*found, pieces])


def _list_differences(reason: str, differences: Sequence[Difference]) -> str:
    return "\n".join([reason, *(f"  {difference}" for difference in differences)])


def _first_chunk(session: Session, questions: Questions) -> Difference:
    """Compare prompts of one chunk, which stands where it was encoded: reused as it is, it is what full prefill
    computes."""
    chunked: list[PromptType] = []
    plain: list[PromptType] = []
    for sample in questions.samples:
        prompt = questions.prompt(sample)
        prompt["chunks"] = prompt["chunks"][:1]
        plain.append({"prompt_token_ids": joined_ids(session.engine, prompt)})
        prompt["blend_selector"] = "none"
        chunked.append(prompt)
    answers = [session.answer(prompts, questions.style.max_tokens) for prompts in (plain, chunked)]
    return Difference.between("one chunk, reused where it was encoded, against full prefill", *answers)
