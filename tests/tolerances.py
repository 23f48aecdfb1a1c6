"""How far results may lie from what is expected, by dtype and kind of comparison: the one table of all tests.

References compute in float32 (or more) on the same weights, rounded to the dtype of the run. float32 limits hold for
any order of summation. Those of bfloat16 (8 bits of precision) and float16 (11) are about twice the largest differences
measured on a CPU and on an H200: there with `torch_native`, and in bfloat16 with `cuda` too. A wrong mask, position or
page is off by several times as much.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tests import settings


class Limit(NamedTuple):
    """The limits of the differences in one comparison."""

    largest: float
    rms: float  # their root mean square: rounding leaves few large differences, a fault many


@dataclass(frozen=True)
class Tolerance:
    logits: Limit  # absolute, of models whose logits have a standard deviation of 0.5 and more
    logprobs: Limit  # absolute, of one output
    kv: Limit  # K and V, relative to their root mean square
    mass: Limit  # likewise of what a question looks at; no mean over many evens out the rounding of a largest
    ties: float  # how far below the likeliest token a greedy one may be
    scores: float  # likewise for chosen positions, in what a rule ranks them by (see `Blended.strengths`)
    rounding: float = 1.6  # of logits, in units of transformers' own in the same dtype (see `rounding`)


TOLERANCES = {
    "float16": Tolerance(
        logits=Limit(0.4, 0.025),
        logprobs=Limit(0.1, 0.03),
        kv=Limit(0.025, 0.002),
        mass=Limit(0.08, 0.006),
        ties=0.02,
        scores=0.001,
    ),
    "float32": Tolerance(
        logits=Limit(2e-4, 2e-5),
        logprobs=Limit(1e-4, 2e-5),
        kv=Limit(1e-4, 2e-5),
        mass=Limit(1e-3, 1e-4),
        ties=0,
        scores=0,
    ),
    "bfloat16": Tolerance(
        logits=Limit(1.5, 0.15),
        logprobs=Limit(0.75, 0.2),
        kv=Limit(0.12, 0.016),
        mass=Limit(0.5, 0.055),
        ties=0.25,
        scores=0.01,
    ),
}
FLOAT32_LOGITS_ON_GPU = Limit(6e-4, 6e-5)  # where heads of 64 differ by up to 4.4e-4, and 3.7e-5 in the mean
# In half precision two right answers may part (see `tests/engine/compare.py`), but no more often than this.
MOST_EXCUSED = {"drawn tokens": 0.25, "chosen positions": 0.1}

_largest: dict[str, tuple[float, float]] = {}  # kind -> the largest difference seen, what is allowed
_compared: Counter[str] = Counter()
_excused: Counter[str] = Counter()


def tolerance() -> Tolerance:
    """Return the tolerance of the run's dtype and device."""
    run = settings.current()
    own = TOLERANCES[run.dtype]
    return own if run.device == "cpu" or not run.exact else replace(own, logits=FLOAT32_LOGITS_ON_GPU)


def check(kind: str, differences: torch.Tensor | Sequence[float], dtype: str | None = None) -> None:
    """Fail unless the differences of one comparison are within the limit of their kind, for the run's dtype."""
    values = torch.as_tensor(differences, dtype=torch.float64).abs()
    limit: Limit = getattr(TOLERANCES[dtype] if dtype else tolerance(), kind)
    if values.numel():
        _check(kind, values.max().item(), limit.largest)
        _check(f"{kind} rms", values.square().mean().sqrt().item(), limit.rms)


def rounding(ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> float:
    """Return how far our logits [rows, vocab] lie from the `exact` ones, in units of the distance of another
    implementation's in the run's dtype; by the row that three quarters of them are nearer than."""
    off, unit = ((each - exact).square().mean(1).sqrt().quantile(0.75).item() for each in (ours, theirs))
    return off / unit


def check_one(kind: str, difference: float) -> None:
    """Fail unless a single difference is within the tolerance of its kind."""
    _check(kind, difference, getattr(tolerance(), kind))


def _check(kind: str, difference: float, allowed: float) -> None:
    _largest[kind] = max((difference, allowed), _largest.get(kind, (0.0, allowed)))
    assert difference <= allowed, f"{kind}: {difference:.3g} is more than {allowed:g}"


def check_kv(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """K or V of any shape, wherever they are; `expected` may have another dtype."""
    check_relative("kv", actual, expected)


def check_relative(kind: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Differences relative to the root mean square of what is expected, of tensors of any shape, wherever they are."""
    assert actual.shape == expected.shape
    wanted = expected.double().cpu()
    check(kind, (actual.double().cpu() - wanted) / wanted.square().mean().sqrt())


def count(kind: str, excused: bool) -> None:
    """Note a comparison that rounding may excuse, and whether it did."""
    _compared[kind] += 1
    _excused[kind] += excused


def too_often() -> list[str]:
    """The kinds of comparison that were excused more often than rounding explains."""
    return [kind for kind, n in _compared.items() if n >= 20 and _excused[kind] > MOST_EXCUSED[kind] * n]


def report() -> list[str]:
    """Return what was seen, a line each: differences, and what was excused; nothing where nothing was compared."""
    seen = [f"{kind} {value:.2g} ({allowed:g})" for kind, (value, allowed) in sorted(_largest.items())]
    lines = [f"largest differences (allowed): {', '.join(seen)}"] if seen else []
    excused = [f"{kind} {_excused[kind]} of {n}" for kind, n in sorted(_compared.items())]
    return lines + ([f"excused by rounding: {', '.join(excused)}"] if excused else [])
