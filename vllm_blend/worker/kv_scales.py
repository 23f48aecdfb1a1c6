"""The units of an FP8 cache, measured when the model is loaded: one forward of random tokens says how large K and V of
each head are.

e4m3 has an exponent of its own, so a number within its range is rounded by 6% at most, whatever the scale: what a scale
must do is keep the head's numbers below 448, and most of them above 2**-6. A power of 16 brings the largest to between
2 and 32, which leaves 14 times that for text that is unlike random tokens, and for K after RoPE. For most heads of the
demo models it is 1.
"""

from __future__ import annotations

import logging
import math

import torch

from vllm_blend.attention.context import ForwardContext, LayerHook, forward_context
from vllm_blend.attention.kv_scales import KVScales
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata
from vllm_blend.models.causal_lm import CausalLM, attention_layers
from vllm_blend.ops.paged_kv import PagedKV
from vllm_blend.worker.kv_cache import CacheShape, KVCache

logger = logging.getLogger(__name__)

TOKENS = 256
CENTRE = 8.0  # what the largest number of a head is brought near to, as far as powers of 16 allow
SEED = 0


@torch.inference_mode()
def measure_kv_scales(
    model: CausalLM,
    backend: AttentionBackend,
    shape: CacheShape,
    device: torch.device,
    vocab_size: int,
    max_tokens: int,
    block_size: int,
) -> None:
    """Set `kv_scales` of each attention layer, None where all are 1. `shape` is that of a cache in the model's dtype,
    of which a few pages are made for this."""
    attentions = attention_layers(model)
    count = min(TOKENS, max_tokens)
    ids = torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(SEED))
    blocks = -(-count // block_size)
    cache = KVCache.allocate(shape, blocks, block_size, device)
    positions = torch.arange(count, device=device)
    table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
    metadata = AttentionMetadata(positions, positions, table, [0, count], [count], at_end=(True,))
    hook = _LargestHook()
    with forward_context(ForwardContext(metadata, cache.layers, backend, (hook,), [0])):
        model(ids.to(device))
    changed = 0
    for layer, attention in enumerate(attentions):
        scales = KVScales(*(nearest_scales(largest) for largest in hook.largest[layer]))
        attention.kv_scales = None if scales.is_one else scales
        changed += int((scales.k != 1).sum() + (scales.v != 1).sum())
    logger.info("FP8 KV cache: %d of %d heads' K and V are scaled", changed, 2 * shape.num_layers * shape.kv_heads)


def nearest_scales(largest: torch.Tensor) -> torch.Tensor:
    """Return powers of 16 that bring the largest numbers of heads nearest to `CENTRE`: 1 for what is 0 or not finite.
    They and their reciprocals are within the range of the dtype of `largest`, in which K and V are divided."""
    known = largest.isfinite() & (largest > 0)
    limit = int(math.log(torch.finfo(largest.dtype).max, 16))
    exponents = torch.log2(torch.where(known, largest.double(), CENTRE) / CENTRE).div(4).round().clamp(-limit, limit)
    return torch.exp2(4 * exponents).float()


class _LargestHook(LayerHook):
    """Finds the largest magnitudes of K before RoPE and of V, by layer and head."""

    def __init__(self) -> None:
        self.largest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def on_unrotated_kv(
        self, layer_idx: int, kv: PagedKV, metadata: AttentionMetadata, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self.largest[layer_idx] = (k.abs().amax((0, 2)), v.abs().amax((0, 2)))
