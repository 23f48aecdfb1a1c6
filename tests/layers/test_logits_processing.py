from __future__ import annotations

import pytest
import torch
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from tests.layers.sampling import DEVICES, random_logits, state
from vllm_blend.layers.logits_processing import process_logits
from vllm_blend.layers.sampling_state import SamplingState

VOCAB = 64


def processed(states: list[SamplingState], logits: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    result = logits.clone().to(device)
    process_logits(result, states)
    return result.cpu()


@pytest.mark.parametrize("device", DEVICES)
def test_repetition_penalty_is_transformers(device: str) -> None:
    prompt, output, logits = [5, 6, 6, 7], [9, 5, 9], random_logits(1, VOCAB)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([prompt + output]), logits.clone())
    actual = processed([state(prompt, output, repetition_penalty=1.3)], logits, device)
    torch.testing.assert_close(actual, expected)
    assert not torch.equal(actual, logits)


@pytest.mark.parametrize("device", DEVICES)
def test_frequency_and_presence_penalties_count_the_output_only(device: str) -> None:
    output, logits = [9, 5, 9, 9], random_logits(1, VOCAB)
    expected = logits.double().clone()
    for token in range(VOCAB):
        count = output.count(token)
        expected[0, token] -= 0.4 * count + 0.7 * (count > 0)
    actual = processed([state([5, 6, 7], output, frequency_penalty=0.4, presence_penalty=0.7)], logits, device)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-6)


def test_penalties_together_repetition_first() -> None:
    prompt, output, logits = [3, 4], [4, 8, 8], random_logits(1, VOCAB)
    expected = RepetitionPenaltyLogitsProcessor(0.8)(torch.tensor([prompt + output]), logits.clone())
    expected[0, 4] -= 1.5 + 0.5
    expected[0, 8] -= 2 * 1.5 + 0.5
    settings = {"repetition_penalty": 0.8, "frequency_penalty": 1.5, "presence_penalty": 0.5}
    torch.testing.assert_close(processed([state(prompt, output, **settings)], logits), expected)


def test_penalties_follow_a_growing_output() -> None:
    """The table of counts is kept between steps: it must equal one made afresh, also after tokens are taken back."""
    settings = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.2}
    sequence, logits = state([1, 2], [], **settings), random_logits(1, VOCAB)
    for token in [5, 2, 5, 60, 5]:
        sequence.output_token_ids.append(token)
        fresh = state([1, 2], sequence.output_token_ids, **settings)
        assert torch.equal(processed([sequence], logits), processed([fresh], logits))
    del sequence.output_token_ids[2:]
    fresh = state([1, 2], [5, 2], **settings)
    assert torch.equal(processed([sequence], logits), processed([fresh], logits))


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
def test_min_tokens_is_transformers(num_output: int) -> None:
    prompt, output, logits = [7, 8, 9], [4, 5, 6][:num_output], random_logits(1, VOCAB)
    processor = MinNewTokensLengthLogitsProcessor(len(prompt), 2, [0, 11], device="cpu")
    expected = processor(torch.tensor([prompt + output]), logits.clone())
    assert torch.equal(processed([state(prompt, output, min_tokens=2, stop_token_ids=[11])], logits), expected)


@pytest.mark.parametrize("output", [[], [5], [5, 6], [6], [3, 5, 6], [6, 5]])
def test_bad_words_are_transformers(output: list[int]) -> None:
    words, logits = [(9,), (5, 6), (5, 6, 7), (6, 5, 5)], random_logits(1, VOCAB)
    # some releases of transformers skip sequences longer than the context, so give them one; none of the words is in it
    ids = torch.tensor([[60, 61, 62, *output]])
    expected = NoBadWordsLogitsProcessor([list(word) for word in words])(ids, logits.clone())
    assert torch.equal(processed([state([1], output, bad_words=words)], logits), expected)


def test_logit_bias_is_transformers() -> None:
    bias, logits = {3: 2.5, 40: -1.25, 63: 100.0}, random_logits(1, VOCAB)
    processor = SequenceBiasLogitsProcessor([[[token], amount] for token, amount in bias.items()])
    torch.testing.assert_close(
        processed([state(logit_bias=bias)], logits), processor(torch.tensor([[1]]), logits.clone())
    )


def test_allowed_tokens_are_all_others_suppressed() -> None:
    logits = random_logits(1, VOCAB)
    others = [token for token in range(VOCAB) if token not in (3, 17, 30)]
    expected = SuppressTokensLogitsProcessor(others, device="cpu")(torch.tensor([[1]]), logits.clone())
    assert torch.equal(processed([state(allowed_token_ids=[30, 3, 17, 3])], logits), expected)


def test_stop_tokens_beyond_the_logits_are_no_matter() -> None:
    """A configuration may name an end of sequence that the model's vocabulary does not have."""
    logits = random_logits(1, VOCAB)
    expected = logits.clone()
    expected[0, 0] = -torch.inf
    assert torch.equal(processed([state(min_tokens=1, stop_token_ids=[VOCAB + 3])], logits), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_do_not_touch_each_other(device: str) -> None:
    def make() -> list[SamplingState]:
        return [
            state(),
            state([1, 2], [3], repetition_penalty=1.5),
            state(allowed_token_ids=[1, 2, 3], logit_bias={2: 5.0}),
            state([1], [5, 5], presence_penalty=1.0, frequency_penalty=-1.0),
            state([1], [7], bad_words=[(7, 8), (9,)], min_tokens=4),
            state(logit_bias={0: -100.0}),
            state([4], [3, 4], allowed_token_ids=[5, 3], repetition_penalty=0.5, bad_words=[(5,)]),
        ]

    logits = random_logits(7, VOCAB)
    together = processed(make(), logits, device)
    alone = [processed([sequence], logits[row : row + 1], device) for row, sequence in enumerate(make())]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together[0], logits[0])
    assert not any(torch.equal(together[row], logits[row]) for row in range(1, 7))
