"""An MLP that is a mixture of experts: every token goes through the few experts that a router picks for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    Each of several ranks has a share of the intermediate size of every expert. Matrices that stay in a file's blocks
    are in `gate_up_blocks`, in which gate comes first, and `down_blocks`, one for each expert; the parameters then have
    no experts."""

    gate_up_blocks: Sequence[ops.BlockMatrix] | None = None
    down_blocks: Sequence[ops.BlockMatrix] | None = None

    def __init__(self, hidden_size: int, spec: ExpertsSpec, ranks: Ranks = ONE_RANK) -> None:
        super().__init__()
        self.inner = equal_share("experts' intermediate size", spec.intermediate_size, ranks)
        inner = self.inner.count
        gate_up, down = (spec.num_experts, 2 * inner, hidden_size), (spec.num_experts, hidden_size, inner)
        self.num_weights = math.prod(gate_up) + math.prod(down)  # also of matrices that are kept elsewhere
        self.gate_up = nn.Parameter(torch.empty(gate_up), requires_grad=False)
        self.down = nn.Parameter(torch.empty(down), requires_grad=False)

    def forward(self, rows: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
        """Run rows [n, hidden], sorted by expert, each through its own expert; `stops` [experts] int32 are the rows at
        which each expert's end."""
        return self.times_down(ops.silu_and_mul(self.times_gate_up(rows, stops)), stops)

    def times_gate_up(self, rows: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
        """Return the products of rows, sorted by expert, with their experts' `gate_up`."""
        return _products(rows, self.gate_up, self.gate_up_blocks, stops)

    def times_down(self, rows: torch.Tensor, stops: torch.Tensor) -> torch.Tensor:
        """Return the products of rows, sorted by expert, with their experts' `down`."""
        return _products(rows, self.down, self.down_blocks, stops)

    def keep_blocks(self, gate_up: Sequence[ops.BlockMatrix] | None, down: Sequence[ops.BlockMatrix] | None) -> None:
        """Multiply by matrices in blocks from now on, one for each expert, instead of a parameter; None leaves it."""
        if gate_up is not None:
            self.gate_up_blocks = gate_up
            self.gate_up = nn.Parameter(self.gate_up.new_empty(0, *self.gate_up.shape[1:]), requires_grad=False)
        if down is not None:
            self.down_blocks = down
            self.down = nn.Parameter(self.down.new_empty(0, *self.down.shape[1:]), requires_grad=False)

    def rows_of(self, name: str) -> dict[str, int]:
        """Return the matrices of an expert that lie in the parameter `name`, one above the other, and the rows of
        each."""
        if name == "down":
            return {"down_proj": self.down.shape[1]}
        return {"gate_proj": self.inner.total, "up_proj": self.inner.total}

    def expert_weights(self, name: str) -> list[dict[str, int]]:
        """Return the same for each expert, by the names of the checkpoint."""
        rows = self.rows_of(name)
        experts = range(len(getattr(self, name)))
        return [{f"{expert}.{own}.weight": count for own, count in rows.items()} for expert in experts]

    def checkpoint_views(self) -> dict[str, torch.Tensor | Layout]:
        """Return where each tensor of the checkpoint goes: "0.gate_proj.weight" and so on."""
        views: dict[str, torch.Tensor | Layout] = {}
        hidden, is_whole = Share.whole(self.down.shape[1]), self.inner.is_whole
        for expert, gate_up in enumerate(self.gate_up.detach()):  # none, if they stay in blocks
            for name, part in zip(("gate_proj", "up_proj"), gate_up.chunk(2), strict=True):
                views[f"{expert}.{name}.weight"] = part if is_whole else row_layout([self.inner], part, hidden)
        for expert, down in enumerate(self.down.detach()):
            views[f"{expert}.down_proj.weight"] = down if is_whole else row_layout([hidden], down, self.inner)
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


def _products(
    rows: torch.Tensor, matrices: torch.Tensor, blocks: Sequence[ops.BlockMatrix] | None, stops: torch.Tensor
) -> torch.Tensor:
    if blocks is not None:
        return ops.grouped_blocks_linear(rows, blocks, stops)
    out: torch.Tensor = torch._grouped_mm(rows, matrices.transpose(-2, -1), offs=stops)
    return out


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
