"""Checks the sizes in a model's config, by the names that config.json gives them.

transformers looks at few of them, and divides by some without a look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vllm_blend.checks import is_number

# Fields that, where a config has them, hold a positive integer.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",  # null: as many as num_attention_heads
    "head_dim",  # null: hidden_size / num_attention_heads
    "max_position_embeddings",
)
_REPAIR = "correct it, or fetch the file again"


def check_config_sizes(fields: Mapping[str, Any], source: str) -> None:
    """Raise ValueError for a size that is not positive, for numbers of heads that do not divide, and for an epsilon
    that is negative or no number. `fields` are those of a config, or of its text part if it has one; `source` says
    where they are from.

    Other types than numbers are left to transformers, which names the field.
    """
    text = fields.get("text_config")
    found: Mapping[str, Any] = text if isinstance(text, Mapping) else fields
    numbers: dict[str, float] = {name: value for name, value in found.items() if is_number(value)}
    for name in SIZES:
        if name in numbers and numbers[name] <= 0:
            raise ValueError(f"{source} has {name}={numbers[name]}: it must be a positive integer; {_REPAIR}")
    epsilon = numbers.get("rms_norm_eps", 0.0)
    if not 0 <= epsilon < math.inf:
        raise ValueError(f"{source} has rms_norm_eps={epsilon}: it must be a finite number of at least 0; {_REPAIR}")
    _check_divides(numbers, "num_attention_heads", "num_key_value_heads", source)
    if "head_dim" not in numbers:  # it follows from the two
        _check_divides(numbers, "hidden_size", "num_attention_heads", source)


def _check_divides(numbers: Mapping[str, float], whole: str, part: str, source: str) -> None:
    if whole in numbers and part in numbers and numbers[whole] % numbers[part]:
        raise ValueError(
            f"{source} has {whole}={numbers[whole]} and {part}={numbers[part]}: the first must be a multiple of the "
            f"second; {_REPAIR}"
        )
