"""An MLP that is a mixture of experts: every token goes through the few experts that a router picks for it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from vllm_blend import ops
from vllm_blend.distributed.ranks import ONE_RANK, Ranks
from vllm_blend.distributed.sharding import Layout, Share, equal_share, row_layout
from vllm_blend.layers.linear import Linear


@dataclass(frozen=True)
class ExpertsSpec:
    """The shape of the mixtures of a decoder."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalizes: bool  # whether the weights of a token's experts are made to add up to 1
    layers: frozenset[int]  # which have experts

    def __post_init__(self) -> None:
        if not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"the model's config sends a token to {self.experts_per_token} of {self.num_experts} experts: "
                "num_experts_per_tok must be at least 1 and at most the number of experts"
            )


class Experts(nn.Module):
    """The matrices of all experts of a layer: `gate_up` [experts, 2 * intermediate, hidden], gate first, and `down`
    [experts, hidden, intermediate]. Their memory is not initialised until the loader fills it.

    Each of several ranks has a share of the intermediate size of every expert."""

    def __init__(self, hidden_size: int, spec: ExpertsSpec, ranks: Ranks = ONE_RANK) -> None:
        super().__init__()
        self.inner = equal_share("experts' intermediate size", spec.intermediate_size, ranks)
        inner = self.inner.count
        gate_up, down = (spec.num_experts, 2 * inner, hidden_size), (spec.num_experts, hidden_size, inner)
        self.gate_up = nn.Parameter(torch.empty(gate_up), requires_grad=False)
        self.down = nn.Parameter(torch.empty(down), requires_grad=False)

    def forward(self, rows: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
        """Run rows [n, hidden], sorted by expert, each through its own expert; `stops` [experts] int32 are the rows at
        which each expert's end."""
        gate_up = torch._grouped_mm(rows, self.gate_up.transpose(-2, -1), offs=stops)
        out: torch.Tensor = torch._grouped_mm(ops.silu_and_mul(gate_up), self.down.transpose(-2, -1), offs=stops)
        return out

    def checkpoint_views(self) -> dict[str, torch.Tensor | Layout]:
        """Return where each tensor of the checkpoint goes: "0.gate_proj.weight" and so on."""
        views: dict[str, torch.Tensor | Layout] = {}
        for expert, (gate_up, down) in enumerate(zip(self.gate_up.detach(), self.down.detach(), strict=True)):
            gate, up = gate_up.chunk(2)
            parts: dict[str, torch.Tensor | Layout] = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            if not self.inner.is_whole:
                hidden = Share.whole(len(down))
                parts = {"gate_proj": row_layout([self.inner], gate, hidden)}
                parts["up_proj"] = row_layout([self.inner], up, hidden)
                parts["down_proj"] = row_layout([hidden], down, self.inner)
            views |= {f"{expert}.{name}.weight": view for name, view in parts.items()}
        return views

    def layouts(self) -> dict[str, Layout]:
        """Return the layouts of the parameters, by name, if these are one rank's share of them."""
        if self.inner.is_whole:
            return {}
        gate_up, down, own, every = self.gate_up.detach(), self.down.detach(), self.inner.entries, slice(None)
        experts, hidden, inner = *down.shape[:2], self.inner.total
        above = (every, slice(own.start, own.stop)), gate_up[:, : self.inner.count]
        below = (every, slice(inner + own.start, inner + own.stop)), gate_up[:, self.inner.count :]
        return {
            "gate_up": Layout((experts, 2 * inner, hidden), (above, below)),
            "down": Layout((experts, hidden, inner), (((every, every, own), down),)),
        }


class SparseMLP(nn.Module):
    """A mixture of SwiGLU experts (Mixtral: Jiang et al., 2024, section 2.1). The router works in float32."""

    def __init__(self, hidden_size: int, spec: ExpertsSpec, ranks: Ranks = ONE_RANK) -> None:
        super().__init__()
        self.spec, self.ranks = spec, ranks
        self.gate = Linear(hidden_size, spec.num_experts)
        self.experts = Experts(hidden_size, spec, ranks)

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights (float32) and the numbers of each token's experts, both [tokens, experts per token]."""
        weights, chosen = self.gate(hidden).float().softmax(-1).topk(self.spec.experts_per_token, -1)
        return weights / weights.sum(-1, keepdim=True) if self.spec.normalizes else weights, chosen

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run hidden [tokens, hidden_size]. What a token gets does not depend on the others of its batch."""
        count = self.spec.experts_per_token
        weights, chosen = self.route(hidden)
        order = chosen.flatten().argsort(stable=True)
        loads = torch.zeros(self.spec.num_experts, dtype=torch.int32, device=hidden.device)
        loads.scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.int32))
        sorted_out = self.experts(hidden[order // count], loads.cumsum(0, dtype=torch.int32))
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out  # back to the order of the tokens: adding up in place would be in any order on a GPU
        by_token = out.view(len(hidden), count, hidden.shape[1])
        mixed: torch.Tensor = torch.einsum("tk,tkh->th", weights.to(hidden.dtype), by_token)
        return mixed if self.ranks.size == 1 else self.ranks.sum(mixed)
