"""Ask development rows during training: how many of their answer tokens are right, in full and from reused chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vllm_blend.finetune.loop import hidden_states, in_half
from vllm_blend.finetune.losses import weighted_loss
from vllm_blend.finetune.masks import FULL, ISOLATED, KINDS, MaskShares, make_reuse
from vllm_blend.finetune.rows import RowBatch, Rows, row_batch


class Development:
    """Development rows on the training device. Training may be stopped by them (`TrainingPlan.target`), never by rows
    of the test split."""

    def __init__(self, rows: Sequence[Rows], batch_sizes: Sequence[int], device: torch.device) -> None:
        self.batches = [
            batch for part, size in zip(rows, batch_sizes, strict=True) for batch in _batches(part, size, device)
        ]

    def accuracy(self, model: Any, shares: MaskShares | None) -> dict[str, float]:
        """Return the share of answer tokens that are likeliest, in full and, if anything is ever reused, isolated."""
        kinds = (FULL,) if shares is None else (FULL, ISOLATED)
        return {KINDS[kind]: self._accuracy(model, kind, shares) for kind in kinds}

    @torch.no_grad()
    def _accuracy(self, model: Any, kind: int, shares: MaskShares | None) -> float:
        hits = asked = 0.0
        for batch in self.batches:
            reuse = None
            if shares is not None:
                kinds = torch.full((len(batch.ids),), kind, device=batch.ids.device)
                slots = shares.recompute_slots(batch.ids.shape[1])  # as in training: no other shape to compile
                nothing = torch.zeros(batch.ids.shape, device=batch.ids.device)
                reuse = make_reuse(batch.chunks, kinds, nothing, slots, sinks=shares.sinks)
            with in_half(batch.ids.device):
                right = weighted_loss(hidden_states(model, batch, reuse), model.get_output_embeddings(), batch).right
            answers = batch.answers[:, 1:]
            hits += (right & answers).sum().item()
            asked += answers.sum().item()
        return hits / asked


def _batches(rows: Rows, size: int, device: torch.device) -> list[RowBatch]:
    """Return the rows in batches of `size`; the last may have fewer."""
    ids, weights, chunks = (torch.from_numpy(numbers).to(device) for numbers in (rows.ids, rows.weights, rows.chunks))
    batch = row_batch(ids, weights, chunks)
    return [batch.part(slice(first, first + size)) for first in range(0, len(rows), size)]
