"""Logits processors that look at every step of an answer: one remembers it, the other makes it another one's answer.

To compare a blend with full prefill token by token, the blend decodes full prefill's answer, whatever it would have
said itself. The choice of what is recomputed has been made by then, from the question alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Recorder:
    """Keeps the model's distribution at each step: log-probabilities [vocabulary] float32, where the logits are."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        self.rows.append(logits.float().log_softmax(0))
        return logits.nan_to_num()  # of a model that computes NaN, which is found by comparing


class Forced:
    """Has a request say the tokens of another's answer, and compares the two at each step."""

    def __init__(self, token_ids: Sequence[int], log_probs: Sequence[torch.Tensor]) -> None:
        self._token_ids, self._log_probs = token_ids, log_probs
        self._kl: list[torch.Tensor] = []
        self._agrees: list[torch.Tensor] = []

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        step = len(output_ids)
        token = self._token_ids[step]
        self._kl.append(kl_divergence(self._log_probs[step], logits.float().log_softmax(0)))
        self._agrees.append(logits.argmax() == token)
        return torch.full_like(logits, -torch.inf).index_fill_(0, torch.tensor([token], device=logits.device), 0.0)

    @property
    def kl(self) -> list[float]:
        """Return KL(other || own) of each step, in nats."""
        return torch.stack(self._kl).tolist()

    @property
    def agrees(self) -> bool:
        """Return whether the request would have said the same of itself: its likeliest token is the forced one at each
        step."""
        return bool(torch.stack(self._agrees).all())


def kl_divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Return KL(p || q) in nats for log-probabilities [vocabulary]; NaN if they hold one."""
    p, q = p.double(), q.double()
    terms = torch.where(p == -torch.inf, 0.0, p.exp() * (p - q))
    return terms.sum().clamp_min(0.0)  # rounding may leave it just below
