"""A block's keys in short: a centre and, per RoPE pair, a radius that holds them all.

RoPE turns the two channels of a pair together, by an angle that the position gives. Moving a whole block of keys by
some positions therefore turns every pair of its centre by one angle and leaves the radii alone: a digest rotates
exactly, as bounds per channel (Quest, Tang et al., ICML 2024) do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KeyDigests:
    """Digests of blocks in some layers; `owner` [blocks] int64 says which chunk a block belongs to.

    A head's channels i and i + rotary_dim / 2 are a pair, as RoPE has it; channels that it leaves alone are paired
    likewise among themselves.
    """

    centre: torch.Tensor  # [layers, blocks, kv_heads, head_dim] float32
    radius: torch.Tensor  # [layers, blocks, kv_heads, head_dim / 2] float32
    owner: torch.Tensor
    rotary_dim: int
    block_size: int

    @classmethod
    def of(cls, keys: torch.Tensor, owner: torch.Tensor, rotary_dim: int) -> KeyDigests:
        """From keys [layers, blocks, block_size, kv_heads, head_dim] as they lie in the pages."""
        keys = keys.float()
        centre = keys.mean(2)
        radius = _pair_lengths(keys - centre[:, :, None], rotary_dim).amax(2)
        return cls(centre, radius, owner, rotary_dim, keys.shape[2])

    def upper_bounds(self, queries: torch.Tensor, scale: float) -> torch.Tensor:
        """No key of a block has a larger score: queries [layers, rows, heads, head_dim] (rotated) -> [layers, rows,
        heads, blocks] float32."""
        kv_heads = self.centre.shape[2]
        q = queries.float().unflatten(2, (kv_heads, -1))  # [layers, rows, kv_heads, group, head_dim]
        along = torch.einsum("lrkgd,lbkd->lrkgb", q, self.centre)
        around = torch.einsum("lrkgp,lbkp->lrkgb", _pair_lengths(q, self.rotary_dim), self.radius)
        return ((along + around) * scale).flatten(2, 3)

    def expected_mass(self, queries: torch.Tensor, scale: float, num_chunks: int) -> torch.Tensor:
        """[rows, chunks] float32: the share of attention that each chunk would get among these blocks if every key had
        its block's bound for a score, mean over layers and heads."""
        shares = self.upper_bounds(queries, scale).softmax(-1).mean((0, 2))  # [rows, blocks]
        mass = torch.zeros(len(shares), num_chunks, device=shares.device)
        return mass.index_add_(1, self.owner, shares)


def _pair_lengths(x: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """[..., head_dim] -> [..., head_dim / 2]: the length of each pair."""
    parts = [part for part in x.split([rotary_dim, x.shape[-1] - rotary_dim], -1) if part.shape[-1]]
    halves = [part.unflatten(-1, (2, -1)) for part in parts]
    return torch.cat([half.square().sum(-2).sqrt() for half in halves], -1)
