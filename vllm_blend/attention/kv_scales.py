"""The units in which the heads of a layer keep K and V, where the pages have a range as short as that of e4m3.

K is divided by a scale as it is computed, and the queries that meet it are multiplied by the same: scores stay what
they were. V is divided, and so is what attention gives, which is multiplied again. The scales are powers of two, so
none of this rounds, and all between these two places, pages, chunks and kernels, knows nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVScales:
    """What K and V of each KV head of a layer are divided by, each [kv_heads] float32."""

    k: torch.Tensor
    v: torch.Tensor

    @property
    def is_one(self) -> bool:
        """Return whether all scales are 1."""
        return bool((self.k == 1).all() and (self.v == 1).all())

    def to_units(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k and v in the units of the pages; `group` query heads share a KV head."""
        return scaled(q, self.k, group), scaled(k, self.k.reciprocal()), scaled(v, self.v.reciprocal())

    def from_units(self, out: torch.Tensor, group: int) -> torch.Tensor:
        """Return what attention over the pages has given, as it would be without scales."""
        return scaled(out, self.v, group)


def scaled(x: torch.Tensor, scales: torch.Tensor, group: int = 1) -> torch.Tensor:
    """Return x times the scale of each head, in the dtype of x. Its elements are those of [rows, len(scales) * group,
    head_dim], whatever its shape, of which the last dimension is head_dim; `group` adjacent heads share a scale."""
    by_head = x.reshape(-1, len(scales), group * x.shape[-1])
    return (by_head * scales.to(x.dtype)[:, None]).view(x.shape)
