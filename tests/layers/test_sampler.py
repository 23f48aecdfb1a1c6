from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.layers.sampling import DEVICES, random_logits, state
from vllm_blend.layers import logprobs, sampling_batch
from vllm_blend.layers.sampler import Sampler
from vllm_blend.layers.sampling_state import SamplingState
from vllm_blend.ops import sampling

VOCAB = 96
STEPS = 6
# every kind of row whose outcome is fixed by its own settings
FIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    {"temperature": 0, "allowed_token_ids": [4, 5, 6], "min_tokens": 3, "stop_token_ids": [5]},
    {"temperature": 0, "bad_words": [(3,), *((first, 9) for first in range(0, 96, 2))], "logit_bias": {9: 4.0}},
    {"seed": 1},
    {"seed": 1, "top_k": 7},
    {"seed": 2, "top_p": 0.6, "temperature": 1.5, "logprobs": 0},
    {"seed": 3, "min_p": 0.1, "presence_penalty": 1.0},
    {"seed": 4, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 0.9, "min_tokens": 2},
]


def generate(states: list[SamplingState], seeds: list[int], engine_seed: int, device: str = "cpu") -> list[list[int]]:
    """Tokens of STEPS steps; the logits of a row depend on its own seed and output only, as a model's do."""
    sampler = Sampler(engine_seed)
    for step in range(STEPS):
        logits = torch.cat([random_logits(1, VOCAB, 1000 * seed + step) for seed in seeds]).to(device)
        output = sampler(logits, states)
        assert not output.errors
        for sequence, token in zip(states, output.token_ids, strict=True):
            sequence.output_token_ids.append(token)
    return [sequence.output_token_ids for sequence in states]


@pytest.mark.parametrize("device", DEVICES)
def test_greedy_and_seeded_rows_do_not_depend_on_the_batch(device: str) -> None:
    seeds = list(range(len(FIXED)))
    alone = [generate([state([2, 3], **s)], [i], engine_seed=i, device=device)[0] for i, s in enumerate(FIXED)]
    together = generate([state([2, 3], **s) for s in FIXED], seeds, engine_seed=99, device=device)
    assert together == alone
    order = torch.randperm(len(FIXED), generator=torch.Generator().manual_seed(0)).tolist()
    unseeded = [state([2, 3], top_p=0.8), state([2, 3], top_k=3)]
    shuffled = generate(
        [unseeded[0], *(state([2, 3], **FIXED[i]) for i in order), unseeded[1]],
        [50, *(seeds[i] for i in order), 51],
        engine_seed=7,
        device=device,
    )
    assert shuffled[1:-1] == [alone[i] for i in order]


def test_large_batches_are_worked_off_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = list(range(len(FIXED)))
    whole = generate([state([2, 3], **s) for s in FIXED], seeds, engine_seed=0)
    for module in (sampling, sampling_batch, logprobs):
        monkeypatch.setattr(module, "MAX_ELEMENTS_AT_ONCE", 3 * VOCAB)
    assert generate([state([2, 3], **s) for s in FIXED], seeds, engine_seed=0) == whole


def test_plain_greedy_is_argmax() -> None:
    logits = random_logits(5, VOCAB)
    output = Sampler(0)(logits, [state(temperature=0) for _ in range(5)])
    assert output.token_ids == logits.argmax(-1).tolist()
    assert output.logprobs == [None] * 5 and output.errors == {}


def test_unseeded_rows_follow_the_engine_seed() -> None:
    def run(engine_seed: int) -> list[list[int]]:
        return generate([state() for _ in range(4)], [0, 0, 0, 0], engine_seed)

    assert run(5) == run(5) != run(6)
    assert len({tuple(tokens) for tokens in run(5)}) == 4  # equal rows draw independently


def test_seed_repeats_and_differs_from_others() -> None:
    def run(seed: int) -> list[int]:
        return generate([state(seed=seed)], [0], engine_seed=0)[0]

    assert run(5) == run(5) != run(6)


@pytest.mark.parametrize(
    "settings", [{}, {"top_p": 0.9, "temperature": 1.3}, {"seed": 11}, {"seed": 11, "top_k": 6}], ids=str
)
def test_frequencies_fit_the_distribution(settings: dict[str, Any]) -> None:
    """Chi-square of 4,000 or more seeded draws against float64 probabilities, at a level of 10^-6."""
    logits = random_logits(1, 12, seed=3, scale=1.0)
    scaled = logits[0].double() / settings.get("temperature", 1.0)
    order = scaled.argsort(descending=True)
    probabilities = scaled.softmax(-1)
    before = probabilities[order].cumsum(-1) - probabilities[order]
    kept = order[before < settings.get("top_p", 1.0)][: settings.get("top_k", 12)]
    expected = torch.zeros(12, dtype=torch.float64)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()

    draws = 4_000 if "seed" in settings else 40_000
    sampler, counts = Sampler(0), torch.zeros(12, dtype=torch.float64)
    states = [state(**settings) for _ in range(1 if "seed" in settings else 500)]
    for _ in range(draws // len(states)):
        output = sampler(logits.expand(len(states), -1), states)
        counts += torch.bincount(torch.tensor(output.token_ids), minlength=12)
    assert counts[expected == 0].sum() == 0
    used = expected > 0
    statistic = ((counts[used] - draws * expected[used]) ** 2 / (draws * expected[used])).sum()
    p_value = torch.special.gammaincc((used.sum() - 1) / 2, statistic / 2)
    assert p_value > 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("settings", [{"temperature": 0}, {"seed": 3, "top_p": 0.5}, {"logit_bias": {1: 2.0}}], ids=str)
def test_unusable_logits_fail_their_row_only(broken: float, settings: dict[str, Any], device: str) -> None:
    logits = random_logits(3, VOCAB).to(device)
    good = Sampler(0)(logits, [state(temperature=0), state(**settings), state(seed=1, logprobs=1)])
    if broken == float("-inf"):
        logits[1] = broken
    else:
        logits[1, 17] = broken
    output = Sampler(0)(logits, [state(temperature=0), state(**settings, logprobs=1), state(seed=1, logprobs=1)])
    assert list(output.errors) == [1] and "NaN or infinite" in output.errors[1]
    assert output.token_ids[1] < 0 and output.logprobs[1] is None
    assert (output.token_ids[0], output.token_ids[2]) == (good.token_ids[0], good.token_ids[2])
    assert output.logprobs[2] == good.logprobs[2]


def test_settings_that_exclude_every_token_fail_their_row_only() -> None:
    states = [state(temperature=0), state(allowed_token_ids=[5], bad_words=[(5,)]), state(allowed_token_ids=[5])]
    output = Sampler(0)(random_logits(3, VOCAB), states)
    assert list(output.errors) == [1] and "no token is left" in output.errors[1]
    assert output.token_ids[2] == 5


@pytest.mark.parametrize("device", DEVICES)
def test_steps_may_be_read_later(device: str) -> None:
    """The next step is queued before the last one is read; the settings of a batch are kept while it stays the same."""
    logits = [random_logits(4, VOCAB, step).to(device) for step in range(6)]

    def batches() -> list[list[SamplingState]]:
        states = [state(), state(seed=2, top_k=5), state(temperature=0), state(min_p=0.1)]
        return [states, states, states[::-1], states[::-1], [*states[:3], state(temperature=0)], states]

    one_by_one, ahead = Sampler(3), Sampler(3)
    expected = [one_by_one(x, states).token_ids for x, states in zip(logits, batches(), strict=True)]
    pending = [ahead.start(x, states) for x, states in zip(logits, batches(), strict=True)]
    assert [p.result().token_ids for p in pending] == expected
    assert [p.tokens.tolist() for p in pending] == expected
    assert pending[0].result() is pending[0].result()


def test_a_batch_ends_with_its_min_tokens() -> None:
    """A kept batch must not go on holding back tokens that may come by now."""
    sampler, logits = Sampler(0), torch.zeros(1, VOCAB)
    logits[0, 0] = 9.0
    sequence = state(temperature=0, min_tokens=2)
    for expected in (1, 1, 0):
        [token] = sampler(logits, [sequence]).token_ids
        assert token == expected
        sequence.output_token_ids.append(token)


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = random_logits(2, VOCAB)
    expected = logits.double().log_softmax(-1)
    settings = {"temperature": 0, "allowed_token_ids": [6], "logit_bias": {6: 50.0}, "logprobs": 3}
    output = Sampler(0)(logits, [state([1], [6], repetition_penalty=2.0, **settings), state(temperature=0)])
    assert output.token_ids[0] == 6 and output.logprobs[1] is None
    entry = output.logprobs[0]
    assert entry is not None and list(entry) == [6, *expected[0].topk(3).indices.tolist()]
    assert entry[6].rank == int((expected[0] > expected[0, 6]).sum()) + 1
    for token, logprob in entry.items():
        assert logprob.logprob == pytest.approx(expected[0, token].item(), abs=1e-5)


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(len(FIXED), VOCAB)
    before = logits.clone()
    Sampler(0)(logits, [state([2], [3], **settings) for settings in FIXED])
    assert torch.equal(logits, before)


def test_states_and_rows_must_match() -> None:
    with pytest.raises(ValueError, match="3 rows of logits for 2 states"):
        Sampler(0)(random_logits(3, VOCAB), [state(), state()])
