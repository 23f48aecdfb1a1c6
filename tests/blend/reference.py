"""Chunk reuse and blending in the plainest way, to compare the engine with: one prompt, float32, no pages, no kernels.

Written on the parts of a Hugging Face Llama (its projections and norms); rotation, masks and selection are spelled out.
K is kept before RoPE, a token at position p attends to keys at positions <= p, and the suffix is always computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

LayerKV = list[tuple[torch.Tensor, torch.Tensor]]  # per layer K before RoPE and V, each [tokens, kv_heads, head_dim]


@dataclass(frozen=True)
class Context:
    """What a prompt reuses: token ids before the suffix, their stored KV, and which of them may be recomputed."""

    ids: list[int]
    kv: LayerKV
    offsets: torch.Tensor  # [tokens] int64, place of each token in its chunk
    candidates: torch.Tensor  # [tokens] bool


@dataclass
class Blended:
    chosen: torch.Tensor  # [n] int64, ascending
    strengths: torch.Tensor  # [tokens of the context], what candidates were ranked by; -inf for all others
    keys: list[torch.Tensor]  # per layer, rotated, [tokens, kv_heads, head_dim]
    values: list[torch.Tensor]
    hidden: torch.Tensor  # [hidden_size] of the last token, before the final norm
    num_tokens: int


@dataclass(frozen=True)
class BlendReference:
    """`model` is a LlamaForCausalLM in float32."""

    model: Any

    @property
    def _layers(self) -> Any:
        return self.model.model.layers

    @property
    def _head_dim(self) -> int:
        head_dim: int = self.model.config.head_dim
        return head_dim

    @torch.no_grad()
    def encode(self, ids: Sequence[int]) -> LayerKV:
        """KV of ids computed on their own, from position 0."""
        positions = torch.arange(len(ids))
        hidden = self._embed(ids)
        stored = []
        for layer in self._layers:
            q, k, v = self._project(layer, hidden)
            stored.append((k, v))
            weights = self._weights(self._rotate(q, positions), self._rotate(k, positions), positions)
            hidden = self._finish(layer, hidden, weights, v)
        return stored

    def compose(self, prefix: list[int], chunks: Sequence[list[int]]) -> Context:
        """The prefix and the chunks, every chunk encoded after the prefix. Prefix and first chunk need no repair."""
        parts = [self.encode(prefix)] if prefix else []
        ids, offsets = list(prefix), list(range(len(prefix)))
        for chunk in chunks:
            encoded = self.encode([*prefix, *chunk])
            parts.append([(k[len(prefix) :], v[len(prefix) :]) for k, v in encoded])
            ids += chunk
            offsets += range(len(chunk))
        kv = [(torch.cat([p[i][0] for p in parts]), torch.cat([p[i][1] for p in parts])) for i in range(len(parts[0]))]
        candidates = torch.arange(len(ids)) >= len(prefix) + len(chunks[0])
        return Context(ids, kv, torch.tensor(offsets), candidates)

    @torch.no_grad()
    def blend(
        self,
        context: Context,
        suffix: Sequence[int],
        rule: str,
        budget: int,
        check_layer: int = 1,
        instead: torch.Tensor | None = None,
    ) -> Blended:
        """Prefill context + suffix with `budget` of the context's candidates recomputed, chosen by `rule`.

        `instead` [budget] is recomputed in place of the rule's own choice, which is what the result says all the same.
        """
        ids = [*context.ids, *suffix]
        start, n = len(context.ids), len(ids)
        positions = torch.arange(n)
        blank = torch.zeros(len(suffix), *context.kv[0][0].shape[1:])
        old = [(torch.cat([k, blank]), torch.cat([v, blank])) for k, v in context.kv]
        strengths = None
        if rule == "none":
            strengths = torch.zeros(start)
        elif rule == "first_tokens":
            strengths = -context.offsets.float()
        elif rule.startswith("question_attention"):
            strengths = self._question_scores(ids, old, start).log()
        chosen = None if strengths is None else self._best(strengths, context, budget)
        active = positions if chosen is None else torch.cat([chosen if instead is None else instead, positions[start:]])
        hidden = self._embed(ids)[active]
        keys, values = [], []
        for index, (layer, (k_old, v_old)) in enumerate(zip(self._layers, old, strict=True)):
            q, k, v = self._project(layer, hidden)
            k_all, v_all = k_old.clone(), v_old.clone()
            k_all[active], v_all[active] = k, v  # the check layer keeps the fresh K and V of every token
            if chosen is None and index == check_layer:
                fresh, stored = {"value_deviation": (v_all, v_old), "key_deviation": (k_all, k_old)}[rule]
                size = fresh.square().sum((1, 2)).mean().sqrt()
                strengths = (fresh - stored)[:start].square().sum((1, 2)).sqrt() / size
                chosen = self._best(strengths, context, budget)
                active = torch.cat([chosen if instead is None else instead, positions[start:]])
                q, hidden = q[active], hidden[active]
            keys.append(self._rotate(k_all, positions))
            values.append(v_all)
            weights = self._weights(self._rotate(q, active), keys[-1], active)
            hidden = self._finish(layer, hidden, weights, v_all)
        assert strengths is not None and chosen is not None
        return Blended(chosen, strengths.masked_fill(~context.candidates, -torch.inf), keys, values, hidden[-1], n)

    @torch.no_grad()
    def decode(self, blended: Blended, tokens: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [tokens, vocabulary] of each of `tokens`, after those before it."""
        logprobs: list[torch.Tensor] = []
        hidden = blended.hidden
        for step, token in enumerate(tokens):
            logprobs.append(self.model.lm_head(self.model.model.norm(hidden)).log_softmax(-1))
            position = torch.tensor([blended.num_tokens + step])
            hidden = self._embed([token])
            for index, layer in enumerate(self._layers):
                q, k, v = self._project(layer, hidden)
                blended.keys[index] = torch.cat([blended.keys[index], self._rotate(k, position)])
                blended.values[index] = torch.cat([blended.values[index], v])
                weights = self._weights(self._rotate(q, position), blended.keys[index], position)
                hidden = self._finish(layer, hidden, weights, blended.values[index])
            hidden = hidden[0]
        return torch.stack(logprobs)

    def _question_scores(self, ids: Sequence[int], old: LayerKV, start: int) -> torch.Tensor:
        """Attention that the suffix pays to each context token, mean over the third quarter of the layers and over
        heads, summed over the suffix."""
        positions = torch.arange(len(ids))
        suffix = positions[start:]
        hidden = self._embed(ids)[suffix]
        scores = torch.zeros(start)
        first, stop = len(old) // 2, -(-3 * len(old) // 4)
        for index, (layer, (k_old, v_old)) in enumerate(list(zip(self._layers, old, strict=True))[:stop]):
            q, k, v = self._project(layer, hidden)
            k_all, v_all = k_old.clone(), v_old.clone()
            k_all[suffix], v_all[suffix] = k, v
            weights = self._weights(self._rotate(q, suffix), self._rotate(k_all, positions), suffix)
            if index >= first:
                scores += weights[:, :, :start].mean(0).sum(0) / (stop - first)
            hidden = self._finish(layer, hidden, weights, v_all)
        return scores

    def _best(self, scores: torch.Tensor, context: Context, budget: int) -> torch.Tensor:
        allowed = scores.masked_fill(~context.candidates, float("-inf"))
        budget = min(budget, int(context.candidates.sum()))
        return allowed.sort(descending=True, stable=True).indices[:budget].sort().values

    def _embed(self, ids: Sequence[int]) -> torch.Tensor:
        embedded: torch.Tensor = self.model.model.embed_tokens(torch.tensor(list(ids)))
        return embedded

    def _project(self, layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        normed, attention = layer.input_layernorm(hidden), layer.self_attn
        q, k, v = (p(normed) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k, v = (each.view(len(normed), -1, self._head_dim) for each in (q, k, v))
        return q, k, v

    def _rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """RoPE of x [tokens, heads, head_dim]: the first half of a head pairs with the second."""
        parameters = self.model.config.rope_parameters
        if parameters["rope_type"] == "default":
            frequencies = parameters["rope_theta"] ** (-torch.arange(0, self._head_dim, 2).double() / self._head_dim)
            angles = (positions.double()[:, None] * frequencies)[:, None]
            cos, sin = angles.cos().float(), angles.sin().float()
        else:
            tables = self.model.model.rotary_emb(x, positions[None])  # each [1, tokens, head_dim], its halves equal
            cos, sin = (table[0, :, None, : self._head_dim // 2] for table in tables)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def _weights(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Softmax of queries [n, heads, head_dim] at `positions` over keys at 0, 1, ... -> [heads, n, keys]."""
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("nhd,mhd->hnm", q, k) / self._head_dim**0.5
        future = torch.arange(len(k))[None, None] > positions[None, :, None]
        weights: torch.Tensor = scores.masked_fill(future, float("-inf")).softmax(-1)
        return weights

    def _finish(self, layer: Any, hidden: torch.Tensor, weights: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        v = v.repeat_interleave(weights.shape[0] // v.shape[1], 1)
        out = torch.einsum("hnm,mhd->nhd", weights, v).flatten(1)
        hidden = hidden + layer.self_attn.o_proj(out)
        output: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return output


def pad_suffix(kv: LayerKV, tokens: int) -> list[list[torch.Tensor]]:
    """Stored KV with `tokens` zero rows behind it, flat as the hook `old_kvs` takes it."""
    return [[F.pad(t.flatten(1), (0, 0, 0, tokens)) for t in pair] for pair in kv]
