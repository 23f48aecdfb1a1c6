"""Rotary position embedding from float32 tables; one instance serves every layer with the same parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from vllm_blend import ops
from vllm_blend.layers.rope_frequencies import RopeSpec


class RotaryEmbedding(nn.Module):
    """Rotates queries and keys at explicit positions below `max_position`.

    `cos` and `sin` [max_position, rotary_dim / 2] stay float32 whatever the model is cast to: bf16 angles are off by
    whole positions a few hundred tokens in.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, spec: RopeSpec, max_position: int) -> None:
        super().__init__()
        if max_position <= 0:
            raise ValueError(f"max_position must be positive, got {max_position}")
        self.spec = spec
        self.max_position = max_position
        positions = torch.arange(max_position, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, spec.inverse_frequencies())
        scale = 1.0 if spec.attention_factor is None else spec.attention_factor
        device = torch.get_default_device()
        self.register_buffer("cos", (angles.cos() * scale).to(device), persistent=False)
        self.register_buffer("sin", (angles.sin() * scale).to(device), persistent=False)
        self._sharing = False
        self._shared: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q [T, heads, head_dim] and k [T, kv_heads, head_dim] to positions [T] int64."""
        cos, sin = self.at(positions)
        return ops.rotary_qk(q, k, cos, sin)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `cos_sin`, looked up once for all layers of a step (see `one_step`)."""
        shared = self._shared
        if shared is not None and shared[0] is positions:
            return shared[1], shared[2]
        cos, sin = self.cos_sin(positions)
        if self._sharing:
            self._shared = (positions, cos, sin)
        return cos, sin

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin at positions [T] int64, each [T, rotary_dim / 2] float32."""
        return self.cos.index_select(0, positions), self.sin.index_select(0, positions)

    def fingerprint(self) -> str:
        """Return the RoPE parameters as a short stable text, the same for any table length."""
        return self.spec.fingerprint()

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Share one table lookup between layers that pass the same positions tensor.

        The tensor is compared by identity, which is right only while nothing writes to it: hence the scope of one
        forward pass.
        """
        self._sharing, self._shared = True, None
        try:
            yield
        finally:
            self._sharing, self._shared = False, None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RotaryEmbedding:
        # Module.to/half/bfloat16 end here: follow the device, refuse the dtype.
        for name in ("cos", "sin"):
            table = getattr(self, name)
            moved = fn(table)
            setattr(self, name, moved if moved.dtype == torch.float32 else table.to(moved.device))
        return self
