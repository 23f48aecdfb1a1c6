"""Blends over compressed chunks in the plainest way: `BlendReference` in float64, what heads have not kept masked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.blend.reference import BlendReference, Context


def worth(metric: str, keys: torch.Tensor) -> torch.Tensor:
    """What each key [tokens, head_dim] of a head is worth: of one metric, its paper's definition."""
    if metric == "knorm":
        return -keys.norm(dim=-1)
    assert metric == "keydiff"
    directions = keys / keys.norm(dim=-1, keepdim=True)
    return -torch.cosine_similarity(keys, directions.mean(0)[None], dim=-1)


@dataclass(frozen=True)
class CompressedReference(BlendReference):
    """`model` is a LlamaForCausalLM in float64."""

    def kept(self, context: Context, sizes: Sequence[int], metric: str, share: float) -> list[torch.Tensor]:
        """Per layer [tokens of the context, kv_heads] bool, of a prefix and chunks of these sizes."""
        layers = []
        for k, _ in context.kv:
            kept = torch.ones(k.shape[:2], dtype=torch.bool)
            start = sizes[0]
            for size in sizes[1:]:
                for head in range(k.shape[1]):
                    order = worth(metric, k[start : start + size, head]).argsort(descending=True)
                    kept[start + order[max(1, math.ceil(share * size)) :], head] = False
                start += size
            layers.append(kept)
        return layers

    @torch.no_grad()
    def logprobs(
        self,
        context: Context,
        kept: Sequence[torch.Tensor],
        suffix: Sequence[int],
        chosen: torch.Tensor,
        answer: Sequence[int],
    ) -> torch.Tensor:
        """Log-probabilities [answer, vocabulary] of the tokens of an answer, each after those before it, when the
        positions `chosen` of the context are computed again."""
        ids = [*context.ids, *suffix, *answer]
        start = len(context.ids)
        active = torch.cat([chosen, torch.arange(start, len(ids))])
        hidden, _ = self._pass(context, kept, ids, active, len(context.kv))
        rows = self.model.lm_head(self.model.model.norm(hidden)).log_softmax(-1)
        first = len(chosen) + len(suffix) - 1
        return rows[first : first + len(answer)]

    @torch.no_grad()
    def best(
        self, context: Context, kept: Sequence[torch.Tensor], suffix: Sequence[int], budget: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The positions that question attention chooses, and the attention that each of the context gets."""
        start, looked = len(context.ids), -(-3 * len(context.kv) // 4)
        ids = [*context.ids, *suffix]
        _, weights = self._pass(context, kept, ids, torch.arange(start, len(ids)), looked)
        scores = torch.stack([each[:, :, :start].mean(0).sum(0) for each in weights]).mean(0)
        return self._best(scores, context, budget), scores

    def _pass(
        self, context: Context, kept: Sequence[torch.Tensor], ids: Sequence[int], active: torch.Tensor, layers: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Hidden states of the rows at positions `active` behind some layers, and their attention in each."""
        positions, more = torch.arange(len(ids)), len(ids) - len(context.ids)
        hidden, seen = self._embed(ids)[active], []
        for index in range(layers):
            layer = self._layers[index]
            q, k, v = self._project(layer, hidden)
            k_all, v_all = (torch.cat([t, torch.zeros(more, *t.shape[1:], dtype=t.dtype)]) for t in context.kv[index])
            k_all[active], v_all[active] = k, v
            there = torch.cat([kept[index], torch.ones(more, k.shape[1], dtype=torch.bool)])
            there[active] = True
            group = q.shape[1] // k.shape[1]
            keys = self._rotate(k_all, positions).repeat_interleave(group, 1)
            scores = torch.einsum("nhd,mhd->hnm", self._rotate(q, active), keys) / self._head_dim**0.5
            visible = (positions <= active[:, None])[None] & there.repeat_interleave(group, 1).t()[:, None]
            weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
            hidden = self._finish(layer, hidden, weights, v_all)
            seen.append(weights)
        return hidden, seen

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        theta = self.model.config.rope_parameters["rope_theta"]
        frequencies = theta ** (-torch.arange(0, self._head_dim, 2).double() / self._head_dim)
        angles = (positions.double()[:, None] * frequencies)[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
