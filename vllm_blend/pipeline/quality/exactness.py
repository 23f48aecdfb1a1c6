"""Whether recomputing everything is full prefill, to rounding: without that, no other ratio of a model can be judged.

Three more comparisons say where to look when it is not: the same prompt twice, the same prompt in pieces, and a chunk
that is placed just where it was encoded.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from vllm_blend.inputs import PromptType
from vllm_blend.pipeline.quality.questions import Questions, joined_ids
from vllm_blend.pipeline.quality.session import Answers, Session
from vllm_blend.pipeline.quality.settings import RECOMPUTE_ALL, Run
from vllm_blend.pipeline.quality.sweep import blended, in_full, kl_divergence

NUM_QUESTIONS = 8
PIECE = 32  # tokens that a prompt is computed by, where it is computed in pieces


NOT_DETERMINISTIC = (
    "The model is not deterministic: the same prompts gave other answers the second time. Look for dropout or noise in "
    "its forward pass, weights that were never loaded, and kernels whose sums depend on the batch."
)
DEPENDS_ON_STEPS = (
    "The model's answer depends on how a prompt is cut into steps, so a token's state is no function of the tokens up "
    "to it. Look for positions that count from the step's first token instead of the prompt's, a RoPE that depends on "
    "the prompt's length (it must be one for the whole model), attention that is not causal, and state that is kept "
    "outside the KV cache."
)
WRONG_WHERE_PLACED = (
    "A chunk that is placed just where it was encoded is not what full prefill computes there: its KV is stored or "
    "placed wrongly. K is stored before RoPE and rotated when it is placed. Look for a wrong RoPE: one that the model "
    "applies otherwise than `self_attn.attn.rotary.cos_sin` says (another base, scaling or layer type); and for K or V "
    "that are changed after they were stored."
)
WRONG_ELSEWHERE = (
    "Prompts in pieces are right, and so are chunks where they were encoded: the two together go wrong. Look for "
    "K and V of recomputed tokens that do not end up where the reused ones were."
)


@dataclass(frozen=True)
class Limit:
    """What rounding may do. On the demo model it does far less: see the tests."""

    kl: float  # nats, of the first token, mean over the questions
    same: float  # share of answers that are word for word the same


LIMITS = {
    torch.float32: Limit(1e-5, 0.99),
    torch.float16: Limit(1e-3, 0.75),
    torch.bfloat16: Limit(1e-2, 0.75),
}


@dataclass(frozen=True)
class Difference:
    """Of two ways to compute the same answers."""

    what: str
    kl: float
    same: float

    @classmethod
    def of(cls, what: str, expected: Answers, found: Answers) -> Difference:
        pairs = list(zip(expected.answers, found.answers, strict=True))
        kl = statistics.fmean(kl_divergence(a.first, b.first) for a, b in pairs)
        return cls(what, kl, statistics.fmean(a.token_ids == b.token_ids for a, b in pairs))

    def within(self, limit: Limit) -> bool:
        return self.kl <= limit.kl and self.same >= limit.same  # of NaN, neither is so

    def __str__(self) -> str:
        return f"{self.what}: KL {self.kl:.1e} nats, {100 * self.same:.0f}% of the answers equal"


def check_exactness(session: Session, questions: Questions) -> tuple[Answers, list[Difference], Limit]:
    """Full prefill's answers to the first few questions, what was compared (the last of it is beyond the limit if
    anything is), and the limit of the model's dtype."""
    few = replace(questions, samples=questions.samples[:NUM_QUESTIONS])
    limit = LIMITS[session.dtype]
    full = in_full(session, few, few.samples)
    found = [Difference.of("full prefill, twice", full, in_full(session, few, few.samples))]
    if found[-1].within(limit):
        everything = blended(session, few, few.samples, Run(RECOMPUTE_ALL, 1.0))
        found.append(Difference.of("everything recomputed, against full prefill", full, everything))
    if len(found) == 2 and not found[-1].within(limit):
        found.append(_first_chunk(session, few))
    return full, found, limit


def explain(
    model: str, questions: Questions, full: Answers, found: Sequence[Difference], limit: Limit, **engine_args: Any
) -> str:
    """Why a model failed `check_exactness`, and what was compared. Starts another engine: the first must be gone."""
    if not found[0].within(limit):
        return _listed(NOT_DETERMINISTIC, found)
    few = questions.samples[: len(full.answers)]
    with Session(model, batch=1, **engine_args | {"max_num_batched_tokens": PIECE}) as session:
        pieces = Difference.of(f"full prefill, {PIECE} tokens at a time", full, in_full(session, questions, few))
    if not pieces.within(limit):
        reason = DEPENDS_ON_STEPS
    else:
        reason = WRONG_WHERE_PLACED if not found[-1].within(limit) else WRONG_ELSEWHERE
    return _listed(reason, [*found, pieces])


def _listed(reason: str, differences: Sequence[Difference]) -> str:
    return "\n".join([reason, *(f"  {difference}" for difference in differences)])


def _first_chunk(session: Session, questions: Questions) -> Difference:
    """Prompts of one chunk, which stands where it was encoded: reused as it is, it is what full prefill computes."""
    chunked: list[PromptType] = []
    plain: list[PromptType] = []
    for sample in questions.samples:
        prompt = questions.prompt(sample)
        prompt["chunks"] = prompt["chunks"][:1]
        plain.append({"prompt_token_ids": joined_ids(session.engine, prompt)})
        prompt["blend_selector"] = "none"
        chunked.append(prompt)
    answers = [session.answer(prompts, questions.style.max_tokens) for prompts in (plain, chunked)]
    return Difference.of("one chunk, reused where it was encoded, against full prefill", *answers)
