"""The contract on FlashInfer's paged wrappers (Ye et al., MLSys 2025), planned once a step and run by every layer.

Its causal mask is bottom-right, so a run of adjacent positions becomes a request whose keys end at the run's last
position, which is exact. Short runs would each read all their keys for a few queries, and one custom mask over a whole
request visits every key tile; so scattered queries go in tiles of `TILE_ROWS`, each a request with its keys up to its
own largest position and its own custom mask: about the work that must be done, and a mask bit for each pair.

Plans are made on the host. A step whose rows are all last positions is planned without waiting for the device; one with
scattered rows reads its positions back once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerStep
from vllm_blend.attention.runs import Queries, page_indices, row_index, split_step, tile_masks
from vllm_blend.ops.host_copy import to_device

HEAD_DIMS = (64, 128, 256)
TILE_ROWS = 64  # 16 to 128 differ by about a fifth
# Rows from which a run among scattered ones is worth a request of its own. 15% of a prompt in runs of 32, on an H200 at
# 32/8 heads of 128: 0.16 ms a layer as requests and 0.27 in tiles for 4096 tokens, 8.3 and 11.9 for 32000; in runs of
# 16, 0.27 and 0.27, 18.3 and 13.1.
LONG_RUN = 32
# Split keys keep float32 parts here. FlashInfer recommends 128 MiB; heads of 256 take more.
WORKSPACE_BYTES = 256 * 2**20
FA3_KEYS = 16 * 2**20  # the keys of all requests that the wrappers' index buffer for Hopper holds
MASK_BITS = 2**31 - 1  # of a step: FlashInfer counts them in int32

_Key = tuple[int, float, int | None]  # query heads, scale, window


@dataclass(frozen=True)
class _PlannedRows:
    wrapper: Any
    rows: slice | torch.Tensor


@dataclass
class _StepPlans:
    """The plans of a step, for layers of each kind."""

    metadata: AttentionMetadata
    by_key: dict[_Key, list[_PlannedRows]] = field(default_factory=dict)


class FlashInferBackend(AttentionBackend):
    """See the module's docstring. Takes float16 and bfloat16. Raises ImportError when FlashInfer is not installed.

    The attention mass is computed in plain torch: FlashInfer has no kernel for it.
    """

    name = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        self._library = flashinfer
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # A wrapper holds one plan: every kind of call has its own, and they share the workspace, run after run. Those
        # that nearly every model needs are made now, before the KV cache takes the rest of the memory.
        self._spare = {kind: self._make_wrapper(kind) for kind in ("single", "causal", "tiles")}
        self._wrappers: dict[tuple[str, _Key], Any] = {}
        self._plans: _StepPlans | None = None

    def attend(self, step: LayerStep) -> torch.Tensor:
        q, pages = step.q, (step.kv.key, step.kv.value)
        if self._plans is None or self._plans.metadata is not step.metadata:
            self._plans = _StepPlans(step.metadata)
        key = (q.shape[1], step.scale, step.window)
        if key not in self._plans.by_key:
            self._plans.by_key[key] = self._plan(step, key)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._plans.by_key[key]:
            queries = q[part.rows].contiguous()
            if isinstance(part.rows, slice):
                part.wrapper.run(queries, pages, out=out[part.rows])
            else:
                out[part.rows] = part.wrapper.run(queries, pages)
        return out

    def _plan(self, step: LayerStep, key: _Key) -> list[_PlannedRows]:
        split = split_step(step.metadata, step.kv.block_size, step.window, LONG_RUN, TILE_ROWS)
        common: dict[str, Any] = {
            "num_qo_heads": step.q.shape[1],
            "num_kv_heads": step.kv.kv_heads,
            "page_size": step.kv.block_size,
            "sm_scale": step.scale,
            "window_left": -1 if step.window is None else step.window - 1,
            "q_data_type": step.q.dtype,
        }
        planned = []
        for kind, queries in (("single", split.single), ("causal", split.causal), ("tiles", split.tiles)):
            if len(queries):
                wrapper = self._wrapper(kind, queries, key)
                _plan_wrapper(kind, wrapper, queries, step, common)
                planned.append(_PlannedRows(wrapper, row_index(queries.rows, step.q.device)))
        return planned

    def _wrapper(self, kind: str, queries: Queries, key: _Key) -> Any:
        if kind == "causal" and queries.num_keys.sum() > FA3_KEYS:
            kind = "causal_many_keys"
        if (kind, key) not in self._wrappers:
            self._wrappers[kind, key] = self._spare.pop(kind, None) or self._make_wrapper(kind)
        return self._wrappers[kind, key]

    def _make_wrapper(self, kind: str) -> Any:
        if kind == "single":
            # The tensor-core kernels serve any group of query heads and are the same module as the tiles'.
            return self._library.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True)
        backend = "auto" if kind == "causal" else "fa2"  # auto: FlashAttention-3 on Hopper, which has no masks
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=backend)


def _plan_wrapper(kind: str, wrapper: Any, queries: Queries, step: LayerStep, common: dict[str, Any]) -> None:
    head_dim, block_size, metadata = step.kv.head_dim, step.kv.block_size, step.metadata
    page_offsets, pages = page_indices(queries, metadata.block_tables, block_size)
    last_page = (queries.num_keys - 1) % block_size + 1
    host = [a.astype(np.int32) for a in (queries.offsets, page_offsets, last_page)]
    if kind == "tiles":
        entries = int((queries.lengths * queries.num_keys).sum())
        if entries > MASK_BITS:
            raise RuntimeError(
                f"a step's masks for FlashInfer would have {entries} entries, above {MASK_BITS}: lower "
                "max_model_len, or use attention_backend='cuda'"
            )
        masks = tile_masks(queries, metadata.positions, step.window)
        # The masks are packed on the device, and FlashInfer then wants the offsets there; they know the window.
        rows, starts, last = (to_device(a, pages.device) for a in host)
        masked = {**common, "window_left": -1, "head_dim_qk": head_dim, "custom_mask": masks}
        wrapper.plan(rows, starts, pages, last, **masked)
        return
    rows, starts, last = (torch.from_numpy(a) for a in host)
    if kind == "single":
        wrapper.plan(starts, pages, last, head_dim=head_dim, **common)
    else:
        wrapper.plan(rows, starts, pages, last, head_dim_qk=head_dim, causal=True, **common)
