"""Outputs against a reference model, and against each other.

In float32 tokens are equal and log-probabilities within the tolerance. In half precision rounding depends on the shapes
of a step, so two right answers may part, and only in one of these ways:

- greedy: where rounding decides which of two tokens is the better one: their log-probabilities lie within `ties`.
- drawn: where the random number falls between two cumulative probabilities that moved. Counted.
- blended: where two context tokens matter alike. One in ten of the chosen positions (at least one) may differ. Counted.

What follows such a point has another context and is not compared with the other output; against a reference model every
token is compared, after the tokens that the output itself has before it. `tolerances` bounds how much may be excused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from tests import settings, tolerances
from vllm_blend import LLM, RequestOutput
from vllm_blend.outputs import BlendStats, Logprob

_chosen: dict[int, tuple[BlendStats, list[int]]] = {}  # by identity of an output's `blend`, which is kept alive here


@lru_cache(maxsize=16)  # up to 7 MB each
@torch.inference_mode()
def _hf_logprobs(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids])).logits
    return logits[0].float().log_softmax(-1)


def hf_logprobs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary] log-probabilities of what follows each token, from one plain forward pass."""
    return _hf_logprobs(model, tuple(ids))


def check_entries(entries: Sequence[Mapping[int, Logprob] | None], tokens: Sequence[int], wanted: torch.Tensor) -> None:
    """Reported log-probabilities of `tokens`, one entry each, against rows of the expected ones."""
    differences = []
    for entry, token, expected in zip(entries, tokens, wanted, strict=True):
        assert entry is not None
        assert token in entry
        differences += [logprob.logprob - expected[candidate].item() for candidate, logprob in entry.items()]
    tolerances.check("logprobs", differences)


def assert_logprobs_match(output: RequestOutput, model: Any) -> None:
    """Every reported log-probability of a request, prompt and output, against transformers."""
    assert output.error is None
    prompt = output.prompt_token_ids
    for completion in output.outputs:
        expected = hf_logprobs(model, [*prompt, *completion.token_ids])
        assert completion.logprobs is not None
        check_entries(completion.logprobs, completion.token_ids, expected[len(prompt) - 1 : -1])
        if output.prompt_logprobs is not None:
            assert output.prompt_logprobs[0] is None
            check_entries(output.prompt_logprobs[1:], prompt[1:], expected[: len(prompt) - 1])


def assert_greedy(tokens: Sequence[int], expected: torch.Tensor) -> None:
    """Every token is the likeliest by expected log-probabilities [tokens, vocabulary], or ties with it."""
    for token, row in zip(tokens, expected, strict=True):
        tolerances.check_one("ties", (row.max() - row[token]).item())


def assert_greedy_tokens(output: RequestOutput, model: Any) -> None:
    """Check that a greedy request generated what transformers would, each token after the output's own tokens."""
    [completion] = output.outputs
    expected = hf_logprobs(model, [*output.prompt_token_ids, *completion.token_ids])
    assert_greedy(completion.token_ids, expected[len(output.prompt_token_ids) - 1 : -1])


def assert_same_logprobs(left: RequestOutput, right: RequestOutput) -> None:
    """Two outputs of a prompt have the same tokens with the same log-probabilities (see the module's docstring)."""
    assert left.error is None
    assert right.error is None
    strict = settings.current().exact
    if not strict and _chose_otherwise(left, right):
        return
    for a, b in zip(left.outputs, right.outputs, strict=True):
        if strict:
            assert a.token_ids == b.token_ids
        assert a.logprobs is not None
        assert b.logprobs is not None
        differences: list[float] = []
        drawn, parted = False, False
        for mine, theirs, x, y in zip(a.logprobs, b.logprobs, a.token_ids, b.token_ids, strict=False):
            differences += [mine[token].logprob - theirs[token].logprob for token in mine.keys() & theirs.keys()]
            drawn |= mine[x].rank != 1
            if x != y:
                parted = True
                if mine[x].rank == theirs[y].rank == 1:
                    _assert_tie(mine, theirs, x, y)
                break
        tolerances.check("logprobs", differences)
        assert parted or a.token_ids == b.token_ids
        if drawn and not strict:
            tolerances.count("drawn tokens", parted)


def assert_identical(left: RequestOutput, right: RequestOutput) -> None:
    """Two outputs of the same steps have the same tokens with the same log-probabilities, to the last bit."""
    assert left.error is None
    for a, b in zip(left.outputs, right.outputs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.logprobs is not None
        assert a.logprobs == b.logprobs


def blend_of(output: RequestOutput) -> BlendStats | None:
    """How a prompt was blended, its chunks found or encoded for it: all that was kept counts as encoded. Which tokens
    were kept is left out: they may differ in near-ties."""
    blend = output.blend
    if blend is None:
        return None
    kept = blend.num_exact_tokens + blend.num_reused_tokens + blend.num_encoded_tokens
    return replace(blend, num_exact_tokens=0, num_reused_tokens=0, num_encoded_tokens=kept, token_kinds="")


def _assert_tie(mine: Mapping[int, Logprob], theirs: Mapping[int, Logprob], x: int, y: int) -> None:
    """Two greedy tokens are as likely as each other in both outputs."""
    assert y in mine and x in theirs, "the other output's token is not even among the likeliest here"
    tolerances.check_one("ties", mine[x].logprob - mine[y].logprob)
    tolerances.check_one("ties", theirs[y].logprob - theirs[x].logprob)


def record_chosen(llm: LLM) -> None:
    """Remember which context positions each blend of this engine computes, the first time it does."""
    inner: Any = llm.llm_engine
    record = inner.results.record_blend

    def recorded(request: Any, result: Any) -> None:
        record(request, result)
        stats = inner.requests.groups[request].blend
        _chosen.setdefault(id(stats), (stats, result.computed.tolist()))

    inner.results.record_blend = recorded


def chosen_by(output: RequestOutput) -> list[int] | None:
    """The context positions that a blend computed; None where nothing was blended."""
    return None if output.blend is None else _chosen[id(output.blend)][1]


def assert_same_choice(left: Sequence[int], right: Sequence[int]) -> bool:
    """Two selections from one context: the same positions but for one in ten, at least one. Whether they are equal."""
    assert len(left) == len(right)
    others = len(set(left) - set(right))
    assert others <= (0 if settings.current().exact else max(1, len(left) // 10))
    return others == 0


def _chose_otherwise(left: RequestOutput, right: RequestOutput) -> bool:
    mine, theirs = chosen_by(left), chosen_by(right)
    if mine is None or theirs is None:
        return False
    same = assert_same_choice(mine, theirs)
    tolerances.count("chosen positions", not same)
    return not same
