"""Held-out answers without a model."""

from __future__ import annotations

import numpy as np

from vllm_blend.quality.held_out_file import Answered, Cell, HeldOut

__all__ = ["ABOUT", "answered", "measured"]

ABOUT = {"command": "python -m x", "model": "m", "weights": "w", "dtype": "float32", "split": "test"}


def answered(setting: str, ratio: float | None, correct: str, token_layers: float = 0.25) -> Answered:
    right = np.array([one == "1" for one in correct])
    return Answered(setting, ratio, token_layers, right, tuple(f"no {setting}" for one in right if not one))


def measured(*runs: Answered, first: int = 5_000_000) -> HeldOut:
    """Four questions about two worlds."""
    questions = tuple(f"test-{first + number // 2}-{number % 2}" for number in range(4))
    full = answered("full prefill", None, "1110", 1.0)
    reuse = answered("plain reuse", 0.0, "1000")
    cell = Cell("2 families", questions, ("1hop", "2hop", "1hop", "2hop"), (8, 12), "d", ("a",), (full, reuse, *runs))
    named = [[run.setting, run.ratio] for run in runs]
    return HeldOut(ABOUT | {"runs": named}, (cell,))
