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

from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerCache
from vllm_blend.attention.runs import Queries, page_indices, row_index, split_step, tile_masks, to_device
from vllm_blend.attention.torch_native import TorchNativeBackend

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
class _Planned:
    wrapper: Any
    rows: slice | torch.Tensor


@dataclass
class _Step:
    metadata: AttentionMetadata
    plans: dict[_Key, list[_Planned]] = field(default_factory=dict)


class FlashInferBackend(AttentionBackend):
    """See the module's docstring. Takes float16 and bfloat16. Raises ImportError when FlashInfer is not installed.

    The attention mass is computed by the plain torch twin: FlashInfer has no kernel for it.
    """

    name = "flashinfer"

    def __init__(self, device: torch.device) -> None:
        import flashinfer

        self._library = flashinfer
        self._twin = TorchNativeBackend()
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        # A wrapper holds one plan: every kind of call has its own, and they share the workspace, run after run. Those
        # that nearly every model needs are made now, before the KV cache takes the rest of the memory.
        self._spare = {kind: self._make_wrapper(kind) for kind in ("single", "causal", "tiles")}
        self._wrappers: dict[tuple[str, _Key], Any] = {}
        self._step: _Step | None = None

    def attend(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        if self._step is None or self._step.metadata is not metadata:
            self._step = _Step(metadata)
        key = (q.shape[1], scale, sliding_window)
        if key not in self._step.plans:
            self._step.plans[key] = self._plan(q, cache, metadata, key)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._step.plans[key]:
            queries = q[part.rows].contiguous()
            if isinstance(part.rows, slice):
                part.wrapper.run(queries, (cache.key, cache.value), out=out[part.rows])
            else:
                out[part.rows] = part.wrapper.run(queries, (cache.key, cache.value))
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
        return self._twin.attention_mass(q, cache, metadata, scale, query_rows, sliding_window)

    def _plan(self, q: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, key: _Key) -> list[_Planned]:
        heads, scale, window = key
        step = split_step(metadata, cache.block_size, window, LONG_RUN, TILE_ROWS)
        shape = {"num_qo_heads": heads, "num_kv_heads": cache.key.shape[2], "page_size": cache.block_size}
        common: dict[str, Any] = {
            **shape,
            "sm_scale": scale,
            "window_left": -1 if window is None else window - 1,
            "q_data_type": q.dtype,
        }
        planned = []
        for kind, queries in (("single", step.single), ("causal", step.causal), ("tiles", step.tiles)):
            if len(queries):
                wrapper = self._wrapper(kind, queries, key)
                self._plan_wrapper(kind, wrapper, queries, cache, metadata, window, common)
                planned.append(_Planned(wrapper, row_index(queries.rows, q.device)))
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

    def _plan_wrapper(
        self,
        kind: str,
        wrapper: Any,
        queries: Queries,
        cache: LayerCache,
        metadata: AttentionMetadata,
        window: int | None,
        common: dict[str, Any],
    ) -> None:
        head_dim, block_size = cache.key.shape[3], cache.block_size
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
            masks = tile_masks(queries, metadata.positions, window)
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
