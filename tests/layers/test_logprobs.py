from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.layers.sampling import DEVICES, random_logits
from vllm_blend.layers import logprobs
from vllm_blend.layers.logprobs import prompt_logprobs, start_logprobs

VOCAB = 50


def reference(logits: torch.Tensor) -> np.ndarray:
    x = logits.double().numpy()
    largest = x.max(-1, keepdims=True)
    normal: np.ndarray = x - np.log(np.exp(x - largest).sum(-1, keepdims=True)) - largest
    return normal


@pytest.mark.parametrize("device", DEVICES)
def test_entries_are_the_token_and_the_most_likely_ones(device: str) -> None:
    logits, tokens, counts = random_logits(4, VOCAB), [7, 20, 3, 49], [0, 1, 5, -1]
    entries = start_logprobs(logits.to(device), torch.tensor(tokens, device=device), counts).result()
    expected = reference(logits)
    for row, (entry, token, count) in enumerate(zip(entries, tokens, counts, strict=True)):
        order = np.argsort(-expected[row]).tolist()
        top = order[: VOCAB if count < 0 else count]
        assert list(entry) == list(dict.fromkeys([token, *top]))
        for i, logprob in entry.items():
            assert logprob.logprob == pytest.approx(expected[row, i], abs=1e-5)
            assert logprob.rank == order.index(i) + 1
            assert logprob.decoded_token is None


@pytest.mark.parametrize("count", [0, 1, 2, -1])
@pytest.mark.parametrize("token", range(5))
def test_tied_tokens_have_vllms_ranks(token: int, count: int) -> None:
    """The most likely tokens have places of their own; another one has the last of its equals."""
    logits = [2.0, 1.0, 2.0, 0.0, 2.0]
    (entry,) = start_logprobs(torch.tensor([logits]), torch.tensor([token]), [count]).result()
    top = torch.tensor(logits).topk(5 if count < 0 else count).indices.tolist()
    expected = {token: sum(each >= logits[token] for each in logits)}
    expected |= {each: place for place, each in enumerate(top, start=1)}
    assert next(iter(entry)) == token and {each: logprob.rank for each, logprob in entry.items()} == expected


def test_prompt_logprobs_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random_logits(11, VOCAB)
    tokens = list(range(11))
    whole = prompt_logprobs(logits, tokens, 2)
    monkeypatch.setattr(logprobs, "MAX_ELEMENTS_AT_ONCE", 3 * VOCAB)
    assert prompt_logprobs(logits, tokens, 2) == whole
    assert [token in entry for token, entry in zip(tokens, whole, strict=True)] == [True] * 11


def test_prompt_logprobs_need_a_token_per_row() -> None:
    with pytest.raises(ValueError, match="2 token_ids for 3 rows"):
        prompt_logprobs(random_logits(3, VOCAB), [1, 2], 0)
