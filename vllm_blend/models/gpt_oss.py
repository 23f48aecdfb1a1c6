"""gpt-oss (OpenAI, 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from vllm_blend.distributed.ranks import Ranks
from vllm_blend.distributed.sharding import Layout
from vllm_blend.layers.experts import Experts, ExpertsSpec, SparseMLP
from vllm_blend.layers.linear import Linear
from vllm_blend.models.decoder import DecoderForCausalLM, DecoderLayer, DecoderSpec, attention_biases


@dataclass(frozen=True, kw_only=True)
class ClampedExpertsSpec(ExpertsSpec):
    """The shape of mixtures whose experts gate by x * sigmoid(alpha * x), within `limit`."""

    alpha: float
    limit: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("swiglu_alpha", self.alpha), ("swiglu_limit", self.limit)):
            if not 0 < value < math.inf:
                raise ValueError(f"the model's config gives {name} = {value}: it must be positive and finite")


class GptOssExperts(Experts):
    """Experts with biases, whose gate and up projections alternate row by row, and are clamped."""

    def __init__(self, hidden_size: int, spec: ClampedExpertsSpec, ranks: Ranks) -> None:
        super().__init__(hidden_size, spec, ranks)
        self.alpha, self.limit = spec.alpha, spec.limit
        self.adds_down_bias = ranks.rank == 0  # ranks add up what they return
        experts, rows, _ = self.gate_up.shape
        self.gate_up_bias = nn.Parameter(torch.empty(experts, rows), requires_grad=False)
        self.down_bias = nn.Parameter(torch.empty(experts, hidden_size), requires_grad=False)

    def forward(self, rows: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
        """Run rows [n, hidden], sorted by expert, as `Experts` does."""
        expert = torch.searchsorted(stops, torch.arange(len(rows), dtype=stops.dtype, device=rows.device), right=True)
        product, bias = self.times_gate_up(rows, stops), self.gate_up_bias[expert]
        gate, up = (product[:, ::2], product[:, 1::2]) if self.gate_up_blocks is None else product.chunk(2, -1)
        gate = (gate + bias[:, ::2]).clamp(max=self.limit)
        up = (up + bias[:, 1::2]).clamp(-self.limit, self.limit)
        out = self.times_down((up + 1) * (gate * torch.sigmoid(gate * self.alpha)), stops)
        return out + self.down_bias[expert] if self.adds_down_bias else out

    def checkpoint_views(self) -> dict[str, torch.Tensor | Layout]:
        """Return where each tensor of the checkpoint goes: matrices are [experts, inputs, outputs] there. They are
        filled expert by expert, so that no more than one is dequantized at a time."""
        experts, hidden, inner = *self.down_bias.shape, self.inner.total
        own, every = self.inner.entries, slice(None)
        pairs = slice(2 * own.start, 2 * own.stop)

        def by_expert(shape: tuple[int, ...], index: tuple[slice, slice], matrices: torch.Tensor) -> Layout:
            turned = matrices.detach().transpose(1, 2)
            return Layout(shape, tuple(((slice(e, e + 1), *index), turned[e : e + 1]) for e in range(experts)))

        views: dict[str, torch.Tensor | Layout] = {
            "gate_up_proj_bias": self._bias_layout(),
            "down_proj_bias": self.down_bias.detach(),
        }
        if self.gate_up_blocks is None:
            views["gate_up_proj"] = by_expert((experts, hidden, 2 * inner), (every, pairs), self.gate_up)
        if self.down_blocks is None:
            views["down_proj"] = by_expert((experts, inner, hidden), (own, every), self.down)
        return views

    def _bias_layout(self) -> Layout:
        own = self.inner.entries
        index = (slice(None), slice(2 * own.start, 2 * own.stop))
        return Layout((len(self.gate_up_bias), 2 * self.inner.total), ((index, self.gate_up_bias.detach()),))

    def layouts(self) -> dict[str, Layout]:
        if self.inner.is_whole:
            return {}
        experts, hidden, inner = *self.down.shape[:2], self.inner.total
        own, every = self.inner.entries, slice(None)
        pairs = (every, slice(2 * own.start, 2 * own.stop))
        return {
            "gate_up": Layout((experts, 2 * inner, hidden), ((pairs, self.gate_up.detach()),)),
            "gate_up_bias": self._bias_layout(),
            "down": Layout((experts, hidden, inner), (((every, every, own), self.down.detach()),)),
        }


class GptOssMLP(SparseMLP):
    """A mixture whose router has a bias, and weighs the chosen experts alone against each other."""

    def __init__(self, hidden_size: int, spec: ClampedExpertsSpec, ranks: Ranks) -> None:
        super().__init__(hidden_size, spec, ranks)
        self.gate = Linear(hidden_size, spec.num_experts, bias=True)
        self.experts = GptOssExperts(hidden_size, spec, ranks)

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, chosen = self.gate(hidden).float().topk(self.spec.experts_per_token, -1)
        return scores.softmax(-1), chosen


class GptOssLayer(DecoderLayer):
    """A layer whose MLP is a `GptOssMLP`."""

    @staticmethod
    def make_mlp(spec: DecoderSpec, layer_idx: int) -> nn.Module:
        assert isinstance(spec.experts, ClampedExpertsSpec)
        return GptOssMLP(spec.hidden_size, spec.experts, spec.ranks)


SWIGLU_ALPHA = 1.702  # older versions of transformers, and published config.json files, do not name it


class GptOssForCausalLM(DecoderForCausalLM):
    """A decoder with attention sinks, a window in every other layer, and mixtures of clamped experts."""

    serves = "gpt-oss (20B, 120B)"
    windows = "every other layer"
    has_sinks = True
    layer = GptOssLayer
    takes_quantization = False
    checkpoint_names: ClassVar = {".attn.sinks": ".sinks", ".mlp.gate.": ".mlp.router."}

    @classmethod
    def spec(cls, hf_config: Any) -> DecoderSpec:
        layers = frozenset(range(hf_config.num_hidden_layers))
        return DecoderSpec.from_hf(
            hf_config,
            layer_types=tuple(hf_config.layer_types),
            sliding_window=hf_config.sliding_window,
            sinks=True,
            experts=ClampedExpertsSpec(
                hf_config.num_local_experts,
                hf_config.num_experts_per_tok,
                hf_config.intermediate_size,
                normalizes=True,
                layers=layers,
                alpha=float(getattr(hf_config, "swiglu_alpha", SWIGLU_ALPHA)),
                limit=float(hf_config.swiglu_limit),
            ),
            **attention_biases(hf_config),
        )
