"""Digests of a few neighbouring keys: a centre and, for each RoPE pair, the radius of a circle that holds them all.

RoPE turns the two channels of a pair together, by an angle that the position gives. Moving a stretch of keys by some
positions therefore turns every pair of its centre by one angle and leaves the radii alone: a digest rotates exactly, as
bounds per channel (Quest, Tang et al., ICML 2024) do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Both chosen by benchmarks/offload_quality.py: F1 on 24 questions was 77 with the bounds of 16 keys, 85 with half the
# reach, and 92 with 4 keys and half the reach. The bound itself overrates stretches of unlike keys.
DIGEST_TOKENS = 4
REACH = 0.5


@dataclass(frozen=True)
class KeyDigests:
    """Digests of stretches of keys in some layers. `owner` [stretches] int64 says which chunk each belongs to, or is
    the number of chunks if it belongs to none. They have the keys' dtype, and 3/8 of the size of the layers' keys.

    A head's channels i and i + rotary_dim / 2 are a pair, as RoPE has it; channels that it leaves alone are paired
    likewise among themselves.
    """

    centre: torch.Tensor  # [layers, stretches, kv_heads, head_dim]
    radius: torch.Tensor  # [layers, stretches, kv_heads, head_dim / 2]
    owner: torch.Tensor
    rotary_dim: int

    @classmethod
    def from_keys(cls, keys: torch.Tensor, owner: torch.Tensor, rotary_dim: int) -> KeyDigests:
        """Digest keys [layers, blocks, block_size, kv_heads, head_dim] as they lie in the pages; `owner` [blocks]."""
        size = keys.shape[2]
        count = size // DIGEST_TOKENS if size % DIGEST_TOKENS == 0 else 1  # of a block
        stretches = keys.float().unflatten(2, (count, -1)).flatten(1, 2)
        centre = stretches.mean(2)
        radius = _pair_lengths(stretches - centre[:, :, None], rotary_dim).amax(2)
        return cls(centre.to(keys.dtype), radius.to(keys.dtype), owner.repeat_interleave(count), rotary_dim)

    def scores(self, queries: torch.Tensor, scale: float, reach: float = 1.0) -> torch.Tensor:
        """Return a score for each stretch, [layers, rows, heads, stretches] float32, of rotated queries [layers, rows,
        heads, head_dim]: the centre's score and, times `reach` 0 .. 1, what the radii may add. With 1, no key has a
        larger score, except by the rounding of half precision."""
        kv_heads = self.centre.shape[2]
        q = queries.float().unflatten(2, (kv_heads, -1))  # [layers, rows, kv_heads, group, head_dim]
        along = torch.einsum("lrkgd,lbkd->lrkgb", q, self.centre.float())
        around = torch.einsum("lrkgp,lbkp->lrkgb", _pair_lengths(q, self.rotary_dim), self.radius.float())
        return ((along + reach * around) * scale).flatten(2, 3)

    def expected_mass(self, queries: torch.Tensor, scale: float, num_chunks: int, reach: float = REACH) -> torch.Tensor:
        """Return [rows, chunks] float32: the share of attention that each chunk would get among these stretches if
        every key had its stretch's score, as a mean over layers and heads."""
        shares = self.scores(queries, scale, reach).softmax(-1).mean((0, 2))  # [rows, stretches]
        mass = torch.zeros(len(shares), num_chunks + 1, device=shares.device)
        return mass.index_add_(1, self.owner, shares)[:, :num_chunks]


def _pair_lengths(x: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Return the length of each pair of [..., head_dim], [..., head_dim / 2]."""
    parts = [part for part in x.split([rotary_dim, x.shape[-1] - rotary_dim], -1) if part.shape[-1]]
    halves = [part.unflatten(-1, (2, -1)) for part in parts]
    return torch.cat([half.square().sum(-2).sqrt() for half in halves], -1)
