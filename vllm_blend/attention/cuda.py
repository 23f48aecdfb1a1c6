"""The contract on our CUDA kernels: scattered and dense prefill on tensor cores, split-K decode."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerCache
from vllm_blend.ops import cuda


@dataclass
class _Step:
    """What the layers of a step share. Leading rows that are the only one of their request are decoded."""

    metadata: AttentionMetadata
    num_decodes: int
    longest: int  # of the decoded requests, in tokens
    query_start_loc: torch.Tensor | None  # of the requests after those, [requests + 1] int32 on the device
    plans: dict[tuple[int, int | None], cuda.PrefillPlan] = field(default_factory=dict)


class CUDABackend(AttentionBackend):
    """See the module's docstring. Takes float16 and bfloat16 on compute capability 8.0 or later.

    Raises RuntimeError when the kernels are not built.
    """

    name = "cuda"
    smallest_block = 16
    capturable_decode = True
    capturable_mass = True

    def __init__(self) -> None:
        reason = cuda.unavailable_reason()
        if reason is not None:
            raise RuntimeError(
                "attention_backend='cuda' needs a CUDA device and the compiled kernels, or use 'auto' or "
                f"'torch_native': {reason}"
            )
        self._step: _Step | None = None
        self._decode_workspace: torch.Tensor | None = None
        self._attended: tuple[torch.Tensor, torch.Tensor] | None = None  # queries and output of a mass measurement

    def attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        attended, self._attended = self._attended, None
        if attended is not None and attended[0] is q:
            return attended[1]
        step = self._prepare(metadata)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        d = step.num_decodes
        if d:
            self._decode(q[:d], out[:d], cache, step, scale, sliding_window)
        if step.query_start_loc is not None:
            plan = self._plan(step, cache, q.shape[1], sliding_window)
            cuda.prefill_attention(q[d:], cache.key, cache.value, plan, scale, out[d:])
        return out

    def attention_mass(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        query_rows: list[slice],
        sliding_window: int | None = None,
    ) -> list[torch.Tensor]:
        masses = [torch.zeros(cache.key.shape[2], n, device=q.device) for n in metadata.seq_lens]
        self.add_attention_mass(masses, q, cache, metadata, scale, query_rows, sliding_window)
        return [mass.sum(0) for mass in masses]

    def add_attention_mass(
        self,
        masses: list[torch.Tensor],
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        query_rows: list[slice],
        sliding_window: int | None = None,
        ignored: torch.Tensor | None = None,
    ) -> None:
        lse = torch.empty(q.shape[:2], device=q.device)
        plan = self._plan_all(metadata, cache, q.shape[1], sliding_window)
        # The output comes with the log-sum-exp that is wanted here; the layer asks for it next.
        self._attended = (q, cuda.prefill_attention(q, cache.key, cache.value, plan, scale, lse=lse))
        if ignored is not None:
            lse.masked_fill_(ignored[:, None], torch.inf)  # exp(score - inf) is no mass
        for request, rows in enumerate(query_rows):
            if rows.stop > rows.start:
                cuda.attention_mass(
                    q[rows],
                    lse[rows],
                    metadata.positions[rows],
                    cache.key,
                    cache.value,
                    metadata.block_tables[request],
                    masses[request],
                    scale,
                    sliding_window,
                )

    def _prepare(self, metadata: AttentionMetadata) -> _Step:
        if self._step is None or self._step.metadata is not metadata:
            starts = metadata.query_start_loc
            d = 0
            while d < metadata.num_requests and starts[d + 1] == d + 1:
                d += 1
            rest = None
            if d == 0 and metadata.device_query_start_loc is not None:
                rest = metadata.device_query_start_loc
            elif d < metadata.num_requests:
                offsets = torch.tensor([start - d for start in starts[d:]], dtype=torch.int32)
                rest = offsets.pin_memory().to(metadata.positions.device, non_blocking=True)
            self._step = _Step(metadata, d, max(metadata.seq_lens[:d], default=0), rest)
        return self._step

    def _plan(self, step: _Step, cache: LayerCache, heads: int, window: int | None) -> cuda.PrefillPlan:
        key = (heads, window)
        if key not in step.plans:
            assert step.query_start_loc is not None
            d, metadata = step.num_decodes, step.metadata
            step.plans[key] = cuda.plan_prefill(
                metadata.positions[d:],
                step.query_start_loc,
                metadata.block_tables[d:],
                cache.key,
                cache.value,
                heads,
                window,
            )
        return step.plans[key]

    def _plan_all(
        self, metadata: AttentionMetadata, cache: LayerCache, heads: int, window: int | None
    ) -> cuda.PrefillPlan:
        """A plan of every row, for the pass that measures attention mass: its step may begin with single rows."""
        step = self._prepare(metadata)
        if step.num_decodes == 0:
            return self._plan(step, cache, heads, window)
        offsets = torch.tensor(metadata.query_start_loc, dtype=torch.int32).pin_memory()
        return cuda.plan_prefill(
            metadata.positions,
            offsets.to(metadata.positions.device, non_blocking=True),
            metadata.block_tables,
            cache.key,
            cache.value,
            heads,
            window,
        )

    def _decode(
        self, q: torch.Tensor, out: torch.Tensor, cache: LayerCache, step: _Step, scale: float, window: int | None
    ) -> None:
        metadata, d = step.metadata, step.num_decodes
        kv_heads, head_dim = cache.key.shape[2:]
        workspace = self._decode_workspace
        needed = cuda.decode_workspace_bytes(d, q.shape[1], kv_heads, head_dim)
        if workspace is None or workspace.numel() < needed:
            workspace = cuda.decode_workspace(d, q.shape[1], kv_heads, head_dim, q.device)
            self._decode_workspace = workspace
        cuda.decode_attention(
            q,
            cache.key,
            cache.value,
            metadata.positions[:d],
            metadata.block_tables[:d],
            scale,
            workspace,
            step.longest,
            window,
            out=out,
        )
