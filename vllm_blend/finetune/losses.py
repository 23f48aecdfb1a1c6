"""The loss of a batch: the next token, and on answers the distribution of a frozen teacher.

Logits are the largest tensors of a training step: 4,096 tokens of a vocabulary of 128,000 take 2 GB, and several such
tensors live at once. So they are made for some tokens at a time, and again in the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from vllm_blend.finetune.masks import KINDS
from vllm_blend.finetune.rows import RowBatch

LOGITS_AT_ONCE = {True: 2**27, False: 2**25}  # numbers, on a GPU and elsewhere: 512 and 128 MiB in float32


@dataclass(frozen=True)
class Outcome:
    """The outcome of a batch. `loss` sums over tokens, times their weights. `right` says, for each token but the first
    of a row, whether the model found it likeliest: bool [rows, length - 1]."""

    loss: torch.Tensor
    right: torch.Tensor


@dataclass(frozen=True)
class Taught:
    """The teacher's last hidden states [rows, length, hidden], the head that makes logits of them, and the weight of
    its distribution."""

    hidden: torch.Tensor
    head: Any
    weight: float


def logits_at_once(on_gpu: bool) -> int:
    """Return how many logits are made at a time."""
    return LOGITS_AT_ONCE[on_gpu]


def head_input(model: Any, states: torch.Tensor) -> torch.Tensor:
    """Return what the head makes the model's logits of, from its last hidden states: Granite's are scaled."""
    divisor = getattr(model.config, "logits_scaling", 1.0)
    return states if divisor == 1.0 else states / divisor


def weighted_loss(hidden: torch.Tensor, head: Any, batch: RowBatch, taught: Taught | None = None) -> Outcome:
    """Return the summed loss of the next token, by the tokens' weights. `hidden` is [rows, length, hidden size].

    With a teacher, an answer's tokens add its weight times the divergence KL(teacher || student) between the two
    distributions of the token (Hinton et al., arXiv:1503.02531; for block attention arXiv:2605.15913).
    """
    rows, length = batch.ids.shape
    states = hidden[:, :-1].flatten(0, 1)
    given = tuple(tensor[:, 1:].flatten() for tensor in (batch.ids, batch.weights, batch.answers))
    if taught is not None:
        taught = replace(taught, hidden=taught.hidden[:, :-1].flatten(0, 1))
    at_once = max(1, logits_at_once(hidden.is_cuda) // head.weight.shape[0])
    losses, right = [], []
    for start in range(0, len(states), at_once):
        part = slice(start, start + at_once)
        arguments = (states[part], head, tuple(tensor[part] for tensor in given))
        teaching = None if taught is None else replace(taught, hidden=taught.hidden[part])
        if torch.is_grad_enabled() and len(states) > at_once:
            loss, hits = checkpoint(_part_loss, *arguments, teaching, use_reentrant=False)
        else:
            loss, hits = _part_loss(*arguments, teaching)
        losses.append(loss)
        right.append(hits)
    return Outcome(torch.stack(losses).sum(), torch.cat(right).view(rows, length - 1))


def _part_loss(
    states: torch.Tensor, head: Any, given: tuple[torch.Tensor, ...], taught: Taught | None
) -> tuple[torch.Tensor, torch.Tensor]:
    targets, weights, answers = given
    logits = head(states).float()
    losses = F.cross_entropy(logits, targets, reduction="none")
    if taught is not None:
        with torch.no_grad():
            expected = taught.head(taught.hidden).float().log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), expected, reduction="none", log_target=True).sum(-1)
        losses = losses + taught.weight * divergence * answers
    return (losses * weights).sum(), logits.detach().argmax(-1) == targets


@torch.no_grad()
def accuracies(right: torch.Tensor, answers: torch.Tensor, kinds: torch.Tensor | None) -> dict[str, float]:
    """Return the share of answer tokens that the model finds likeliest, by kind of mask; `kinds` is None for none.

    `right` is as in `Outcome`, `answers` is [rows, length] and `kinds` [rows].
    """
    asked = answers[:, 1:]
    if kinds is None:
        kinds = torch.zeros(len(asked), dtype=torch.int64, device=asked.device)
    totals = {name: asked[kinds == kind].sum().item() for kind, name in enumerate(KINDS)}
    hits = {name: (right & asked)[kinds == kind].sum().item() for kind, name in enumerate(KINDS)}
    return {name: hits[name] / total for name, total in totals.items() if total}
