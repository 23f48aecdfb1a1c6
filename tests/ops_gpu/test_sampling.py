"""The sampling kernels against float64: same numbers, same tokens, but where rounding decides between neighbours."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.layers.sampling import draw, draw_settings, random_logits, state
from tests.layers.test_sampler import FIXED
from vllm_blend import ops
from vllm_blend.layers.sampler import Sampler
from vllm_blend.ops import cuda_sampling, sampling
from vllm_blend.ops.penalties import PenaltyTable, penalize_reference
from vllm_blend.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.6},
    {"temperature": 2.0},
    {"temperature": 2e-5},
    {"top_p": 0.01},
    {"top_p": 0.9},
    {"top_p": 0.9999999},
    {"top_k": 1},
    {"top_k": 20, "temperature": 0.6, "top_p": 0.95},
    {"top_k": 300},
    {"top_k": 20_000, "top_p": 0.7},
    {"min_p": 1.0},
    {"min_p": 0.01, "temperature": 1.5},
    {"min_p": 0.001, "top_p": 0.8},
    {"min_p": 0.02, "top_k": 50, "top_p": 0.99},
]
EPS = 2e-5  # in cumulative probability: what rounding may move a boundary by


def poison() -> None:
    """Leave NaN in the memory that the next tensors will get."""
    torch.full((1 << 24,), float("nan"), device="cuda")
    torch.full((1 << 16,), float("nan"), device="cuda")
    torch.full((64,), float("nan"), device="cuda")


def uniforms(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def judge(
    logits: torch.Tensor, params: list[SamplingParams], numbers: torch.Tensor, tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row: whether the token is the float64 one, and whether it is one that rounding may have made of that."""
    x, numbers, vocab = logits.double(), numbers.to(logits.device)[:, None], logits.shape[1]
    columns = zip(*((*state(**_fields(p)).draw_settings,) for p in params), strict=True)
    temperature, log_min_p, top_k, top_p = (torch.tensor(c, dtype=torch.float64).cuda()[:, None] for c in columns)
    greedy = temperature[:, 0] == 0
    scaled = (x - x.amax(1, keepdim=True)) / temperature.clamp(min=1e-5)
    values = scaled.sort(1, descending=True).values
    ranks = torch.arange(vocab, device=x.device)
    first = (ranks < top_k) & (values >= log_min_p)
    weights = torch.where(first, values.exp(), 0.0)
    before = weights.cumsum(1) - weights
    exact = torch.zeros_like(greedy)
    near = torch.zeros_like(greedy)
    for error in (0.0, -EPS, EPS):
        kept = first & (before < (top_p + error) * weights.sum(1, keepdim=True))
        least = values.gather(1, kept.sum(1, keepdim=True).clamp(min=1) - 1)
        own = torch.where(scaled >= least, scaled.exp(), 0.0)
        upto = own.cumsum(1)
        total = upto[:, -1:]
        chosen, top = (t.gather(1, tokens[:, None]) for t in (own, upto))
        near |= ((chosen > 0) & (top - chosen <= (numbers + EPS) * total) & (top >= (numbers - EPS) * total)).squeeze(1)
        if error == 0.0:
            exact = torch.searchsorted(upto, numbers * total, right=True).squeeze(1) == tokens
    best = x.max(1).values == x.gather(1, tokens[:, None]).squeeze(1)
    lowest = (x == x.amax(1, keepdim=True)).double().argmax(1) == tokens
    return torch.where(greedy, best & lowest, exact), torch.where(greedy, best & lowest, near)


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in ("temperature", "top_p", "top_k", "min_p")}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [1, 7, 1024, 1025, 32000, 50257, 151936])
def test_tokens_are_the_float64_ones(vocab: int, dtype: torch.dtype) -> None:
    """Peaked to flat rows; the flat ones have more candidates for the filters than shared memory holds."""
    right = total = 0
    for scale in (0.0, 0.3, 3.0, 12.0):
        params = [SamplingParams(**s) for s in SETTINGS] * 3
        logits = (random_logits(len(params), vocab, seed=vocab, scale=scale) - 2).to("cuda", dtype)
        numbers = uniforms(len(params), seed=int(scale * 10))
        poison()
        tokens = draw(logits, params, numbers)
        exact, near = judge(logits, params, numbers, tokens)
        wrong = [(i, params[i % len(SETTINGS)], tokens[i].item()) for i in (~near).nonzero().squeeze(1).tolist()]
        assert not wrong, (scale, wrong)
        right, total = right + int(exact.sum()), total + len(params)
    assert right >= 0.98 * total


@pytest.mark.parametrize("vocab", [1000, 50257, 151936])
def test_a_row_depends_on_nothing_else(vocab: int) -> None:
    """Alone, in a batch, from a float32 copy, at an address of another alignment: the same token."""
    params = [SamplingParams(**s) for s in SETTINGS]
    logits = torch.cat([random_logits(8, vocab, 3, 0.3), random_logits(len(params) - 8, vocab, 4)]).to(
        "cuda", torch.bfloat16
    )
    numbers = uniforms(len(params), 5)
    together = draw(logits, params, numbers)
    shifted = torch.empty(len(params), vocab + 3, dtype=logits.dtype, device="cuda")[:, 3:].copy_(logits)
    assert torch.equal(draw(shifted, params, numbers), together)
    assert torch.equal(draw(logits.float(), params, numbers), together)
    alone = [draw(logits[i : i + 1], params[i : i + 1], numbers[i : i + 1]) for i in range(len(params))]
    assert torch.equal(torch.cat(alone), together)
    many = draw(logits.repeat(40, 1), params * 40, numbers.repeat(40))
    assert torch.equal(many, together.repeat(40))


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_logits(dtype: torch.dtype) -> None:
    """The first is greedy's; filters keep all of them or none; zeros of either sign are equal."""
    logits = torch.full((4, 151936), -3.0, device="cuda", dtype=dtype)
    places = torch.tensor([70_001, 70_002, 151_935], device="cuda")
    logits[0, places] = 5.0
    logits[1] = -torch.inf
    logits[1, places] = torch.tensor([0.0, -0.0, 0.0], device="cuda", dtype=dtype)
    greedy = draw(logits, [SamplingParams(temperature=0)] * 4, torch.zeros(4, dtype=torch.float64))
    assert greedy.tolist() == [70_001, 70_001, 0, 0]
    for settings in ({"top_k": 1}, {"top_k": 2, "top_p": 0.4}, {"top_p": 0.1, "temperature": 0.1}, {"min_p": 1.0}):
        for number, place in ((0.0, 0), (0.3, 0), (0.34, 1), (0.66, 1), (0.67, 2), (1 - 2.0**-53, 2)):
            tokens = draw(logits[:2], [SamplingParams(**settings)] * 2, torch.full((2,), number, dtype=torch.float64))
            assert tokens.tolist() == [places[place].item()] * 2
        tokens = draw(logits[2:], [SamplingParams(**settings)] * 2, torch.full((2,), 0.5, dtype=torch.float64))
        assert tokens.tolist() == [75_968] * 2  # as all are equal, none is filtered out


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_finite_maximum(settings: dict[str, Any], dtype: torch.dtype) -> None:
    logits = random_logits(6, 40_000).to("cuda", dtype)
    numbers = uniforms(6)
    good = draw(logits, [SamplingParams(**settings)] * 6, numbers)
    logits[1, 39_999], logits[2, 0], logits[3], logits[4, :39_000] = math.nan, math.inf, -math.inf, -math.inf
    poison()
    tokens = draw(logits, [SamplingParams(**settings)] * 6, numbers)
    assert tokens[1:4].tolist() == [sampling.BROKEN] * 3
    assert torch.equal(tokens[[0, 5]], good[[0, 5]])
    assert tokens[4] >= 39_000


@pytest.mark.parametrize("settings", SETTINGS[1:], ids=str)
def test_ends_of_the_distribution(settings: dict[str, Any]) -> None:
    """Numbers at both ends of [0, 1) draw possible tokens, with impossible ones before and after them."""
    logits = torch.full((2, 5000), -torch.inf, device="cuda")
    logits[:, 2000:2003] = torch.tensor([0.7, 0.7, 0.7], device="cuda").log()
    tokens = draw(logits, [SamplingParams(**settings)] * 2, torch.tensor([0.0, 1.0 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [2000, 2002]


@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 9}, {"min_p": 0.1, "top_k": 12, "top_p": 0.9}],
    ids=str,
)  # fmt: skip
def test_frequencies_fit_the_distribution(settings: dict[str, Any]) -> None:
    """Chi-square of 400,000 draws against float64 probabilities, at a level of 10^-6; fixed seeds."""
    vocab, rows = 40, 4000
    logits = random_logits(1, vocab, seed=9, scale=1.5).cuda()
    scaled = logits[0].double() / settings.get("temperature", 1.0)
    p = scaled.softmax(-1)
    p = torch.where(p >= settings.get("min_p", 0.0) * p.max(), p, 0.0)
    order = p.argsort(descending=True)[: int(settings.get("top_k", vocab))]
    q = p[order] / p[order].sum()
    order = order[q.cumsum(-1) - q < settings.get("top_p", 1.0)]
    expected = torch.zeros(vocab, dtype=torch.float64, device="cuda").index_copy(0, order, p[order] / p[order].sum())
    counts = torch.zeros(vocab, dtype=torch.float64, device="cuda")
    for seed in range(100):
        tokens = draw(logits.expand(rows, -1), [SamplingParams(**settings)] * rows, uniforms(rows, seed))
        counts += torch.bincount(tokens, minlength=vocab)
    used = expected > 0
    assert counts[~used].sum() == 0
    statistic = ((counts - counts.sum() * expected)[used] ** 2 / (counts.sum() * expected[used])).sum()
    assert torch.special.gammaincc((used.sum() - 1) / 2, statistic / 2) > 1e-6


def test_penalties_are_the_twins() -> None:
    """Tables that grow, a little and beyond their room on the device, are rewritten, and move between rows."""
    generator = torch.Generator().manual_seed(1)
    logits = random_logits(5, 2000, seed=2).cuda()
    penalties = torch.rand(3, 5, generator=generator).numpy() + np.float32(0.5)
    outputs = [torch.randint(0, 2000, (900,), generator=generator).tolist() for _ in range(5)]
    tables = [PenaltyTable(range(10 * i, 20 * i)) for i in range(5)]
    for step in (0, 1, 2, 300, 301, 302, 890, 900):
        for table, output in zip(tables, outputs, strict=True):
            table.count(output[:step])
        order = torch.randperm(5, generator=generator).tolist()
        rows = [None if i == 4 and step % 2 else tables[i] for i in order]
        expected, actual = logits.clone(), logits.clone()
        if step:
            penalize_reference(expected, rows, penalties)
            ops.penalize(actual, rows, penalties)
            assert torch.equal(actual, expected) and not torch.equal(actual, logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_changed_rows_are_drawn_again(dtype: torch.dtype) -> None:
    logits = random_logits(32, 5000, seed=2).to("cuda", dtype)
    logits[3, 7] = math.nan
    rows = torch.tensor([3, 5, 6, 20, 31], device="cuda")
    changed = random_logits(5, 5000, seed=3).cuda()
    changed[2] = -math.inf
    draws: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.9}, {"top_k": 2}, {"temperature": 0}, {}]
    settings = draw_settings([SamplingParams(**s) for s in draws], 5000, logits.device)
    everything = draw_settings([SamplingParams()] * 32, 5000, logits.device)
    numbers = uniforms(32).cuda()
    tokens = ops.sample_tokens(logits, everything, numbers)
    expected = tokens.clone()
    ops.resample_tokens(tokens, rows, changed, settings, numbers)
    sampling.resample_tokens_reference(expected, rows, changed, settings, numbers)
    assert torch.equal(tokens, expected)
    assert tokens[3] == sampling.BROKEN and tokens[6] == sampling.NONE_LEFT and tokens[20] == changed[3].argmax()


def test_bad_arguments_are_named() -> None:
    logits, settings = torch.zeros(2, 8, device="cuda"), torch.zeros(2, 4, dtype=torch.float64, device="cuda")
    with pytest.raises(ValueError, match="2 rows of logits, but settings"):
        cuda_sampling.sample_tokens(logits, settings[:1], None)
    with pytest.raises(ValueError, match="contiguous in their last dimension"):
        cuda_sampling.sample_tokens(logits.t()[:2], settings, None)
    with pytest.raises(TypeError, match="settings"):
        cuda_sampling.sample_tokens(logits, settings.float(), None)
    with pytest.raises(ValueError, match="tokens and places go together"):
        cuda_sampling.sample_tokens(logits, settings, None, places=torch.zeros(2, dtype=torch.int64, device="cuda"))
    with pytest.raises(ValueError, match="do not make"):
        cuda_sampling.penalize(logits, torch.zeros(3, dtype=torch.int32, device="cuda"), 0)


def test_steps_are_queued_without_waiting() -> None:
    """Two steps queued before either is read give what the CPU gives, with every kind of row among them."""
    vocab = 96
    seeds = range(len(FIXED))
    device, host = Sampler(0), Sampler(0)
    ours, theirs = ([state([2, 3], [5], **s) for s in FIXED] for _ in range(2))
    steps = [torch.cat([random_logits(1, vocab, 1000 * seed + step) for seed in seeds]) for step in range(2)]
    on_device = [logits.cuda() for logits in steps]
    device.start(on_device[0], [state(seed=1, top_k=3, logprobs=1)] * len(FIXED))  # everything lazy is done
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [device.start(logits, ours) for logits in on_device]
        results = [p.result() for p in pending]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = [host(logits, theirs) for logits in steps]
    assert [r.token_ids for r in results] == [e.token_ids for e in expected]
    assert [p.tokens.tolist() for p in pending] == [e.token_ids for e in expected]
    for result, wanted in zip(results, expected, strict=True):
        assert [None if e is None else list(e) for e in result.logprobs] == [
            None if e is None else list(e) for e in wanted.logprobs
        ]
