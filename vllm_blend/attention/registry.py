"""One attention backend for an engine, by name or the fastest."""

from __future__ import annotations

import logging

import torch

from vllm_blend.attention.choice import choose
from vllm_blend.attention.kinds import KINDS, Unusable, usable
from vllm_blend.attention.measure import HeadLayout
from vllm_blend.attention.metadata import AttentionBackend

logger = logging.getLogger(__name__)


def make_backend(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    num_heads: int = 8,
    num_kv_heads: int = 8,
    decode_graphs: bool = False,
) -> AttentionBackend:
    """The backend called `name`. 'auto' takes the fastest of each job among those that work here, see `choose`.

    With `decode_graphs` the engine wants to capture decode steps, and 'auto' decodes with a backend that lets it.
    Raises ValueError for an unknown name or one that does not fit device, dtype or head size, ImportError for one that
    is not installed or not built, and RuntimeError for one that does not work: with the reason and what to do.
    """
    layout = HeadLayout(device, dtype, num_heads, num_kv_heads, head_dim)
    backend = choose(layout, decode_graphs).make(layout) if name == "auto" else _forced(name, layout)
    if decode_graphs and not backend.capturable_decode:
        logger.info("decoding runs without CUDA graphs: the attention backend %s cannot be captured", backend.name)
    return backend


def _forced(name: str, layout: HeadLayout) -> AttentionBackend:
    if name not in KINDS:
        raise ValueError(f"attention_backend={name!r} is unknown: use 'auto' or one of {sorted(KINDS)}")
    kind = KINDS[name]
    unfit = kind.unfit(layout)
    if unfit is not None:
        raise ValueError(f"attention_backend={name!r} cannot serve this: {unfit}; use 'auto' or 'torch_native'")
    if kind.package is None:  # ours: what they raise says what to do
        return kind.make(layout)
    try:
        with torch.inference_mode():
            return usable(name, layout)
    except Unusable as error:
        raised = ImportError if error.missing else RuntimeError
        raise raised(f"attention_backend={name!r}: {error}. To fix it, {kind.fix}; or use 'auto'") from error
