"""Checks of the fields of SamplingParams. Each raises TypeError or ValueError that names the field, says what was given
and what to use instead."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

from vllm_blend.checks import is_number, is_whole

MAX_BIAS = 1e38


def max_n() -> int:
    """Return how many completions a request may ask for, as the environment variable of vLLM says."""
    given = os.environ.get("VLLM_MAX_N_SEQUENCES", "16384")
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        raise ValueError(f"VLLM_MAX_N_SEQUENCES={given!r} must be a positive integer")
    return int(given)


def check_n(n: Any) -> None:
    """Raise for a number of completions that one request cannot have."""
    check_integer("n", n, 1)
    if n > max_n():
        raise ValueError(
            f"n={n} is more completions than one request may have: use at most {max_n()}, or raise VLLM_MAX_N_SEQUENCES"
        )


def flat_logprobs_by_default() -> bool:
    """Return what the environment variable of vLLM says."""
    given = os.environ.get("VLLM_FLAT_LOGPROBS", "0")
    if given not in ("0", "1"):
        raise ValueError(f"VLLM_FLAT_LOGPROBS={given!r} must be 0 or 1")
    return given == "1"


def check_number(field: str, value: Any, low: float, high: float = math.inf, open_low: bool = False) -> None:
    if not is_number(value):
        raise TypeError(f"{field}={value!r} must be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    below = number <= low if open_low else number < low
    if below or number > high or not math.isfinite(number):
        span = f"above {low:g}" if open_low else f"of at least {low:g}"
        raise ValueError(f"{field}={value!r} is out of range: use a finite number {span}{_at_most(high)}")


def check_integer(field: str, value: Any, low: int, high: int = 2**63 - 1) -> None:
    if not is_whole(value):
        raise TypeError(f"{field}={value!r} must be an integer, not {type(value).__name__}")
    if not low <= int(value) <= high:
        limit = f"of at least {low}" if int(value) < low else f"of at most {high}"
        raise ValueError(f"{field}={value!r} is out of range: use an integer {limit}")


def _at_most(high: float) -> str:
    return "" if high == math.inf else f" and at most {high:g}"


def parse_num_logprobs(field: str, value: Any) -> int | None:
    if value is None or value is False:
        return None
    if value is True:  # the OpenAI API says logprobs=True
        return 1
    check_integer(field, value, -1)
    return int(value)


def parse_strings(field: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{field}={value!r} must be a list of strings, not {type(value).__name__}")
    items = list(value)
    if not all(isinstance(item, str) for item in items):
        raise TypeError(f"{field}={items!r} must hold strings only")
    return items


def parse_token_ids(field: str, value: Any) -> list[int]:
    if value is None:
        return []
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"{field}={value!r} must be a list of token ids, not {type(value).__name__}")
    ids = list(value)
    if set(map(type, ids)) == {int} and min(ids) >= 0:
        return ids  # what nearly every caller gives, in a twentieth of the time
    for token in ids:
        check_integer(f"an entry of {field}", token, 0)
    return [int(token) for token in ids]


def parse_logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise TypeError(f"logit_bias={value!r} must be a dict of token id -> number, not {type(value).__name__}")
    bias: dict[int, float] = {}
    for key, amount in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key  # JSON keys are strings
        if type(token) is not int or token < 0:
            check_integer("a key of logit_bias", token, 0)
        if type(amount) not in (int, float) or not -MAX_BIAS <= amount <= MAX_BIAS:
            check_number(f"logit_bias[{token}]", amount, -MAX_BIAS, MAX_BIAS)
        bias[int(token)] = float(amount)
    return bias
