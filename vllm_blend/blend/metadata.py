"""The hooks of CacheBlend's vLLM fork: a dict on the decoder stack, and KV that users hand over themselves.

Names and meanings are those of that fork, so that scripts written for it run. Its defects are not kept: any suffix is
computed whole, the mask is exact, and `old_kvs` can be used again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from vllm_blend.attention.kv_scales import KVScales, scaled
from vllm_blend.blend.plan import BlendPlan, Segment, make_plan
from vllm_blend.blend.selectors import make_selector
from vllm_blend.checks import check_ratio
from vllm_blend.kv_store.chunk_kv import ChunkKV


class FuseMetadata(dict[str, Any]):
    """The dict `cache_fuse_metadata`, which remembers the thread that switched `collect` or `check` on."""

    thread: int | None = None

    def __setitem__(self, key: str, value: Any) -> None:
        self.update({key: value})

    def __ior__(self, other: Any) -> FuseMetadata:  # type: ignore[misc,override]
        self.update(other)
        return self

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Update the values as a dict does, and note the thread if a hook is switched on."""
        new = dict(*args, **kwargs)
        super().update(new)
        if new.get("collect") or new.get("check"):
            self.thread = threading.get_ident()


def check_one_thread(metadata: dict[str, Any], threads: Iterable[int]) -> None:
    """Raise RuntimeError if a request is added while another thread's hook is on, or with a hook on while requests of
    other threads (`threads`) are unfinished: the hook would act on the wrong request."""
    if not (metadata.get("collect") or metadata.get("check")):
        return
    own = threading.get_ident()
    if getattr(metadata, "thread", None) not in (None, own) or any(thread != own for thread in threads):
        raise RuntimeError(
            "cache_fuse_metadata is shared by the whole engine, and two threads use it: switch collect and check on in "
            "the thread that calls generate, while no other thread has unfinished requests"
        )


def default_fuse_metadata(kv_cache_dtype: torch.dtype) -> dict[str, Any]:
    """Return `cache_fuse_metadata` as a new engine has it.

    Users set `collect` (keep K before RoPE and V of this prompt in `hack_kv`), `check` (blend the next prompt with
    `old_kvs`, then become False again), `selector`, `check_layers`, `recomp_ratio` or `recomp_ratios` (one per check
    layer), and `suffix_len` (trailing tokens that are always computed; None: those that `old_kvs` does not cover, or
    the question, if it was the last prompt collected and ends this one; at least the last token).

    The engine sets, after a blend, `imp_indices` (the chosen positions, then those of the suffix, int64),
    `org_seq_len`, `original_slot_mapping` and `our_slot_mapping` (cache slots of all tokens, and of those computed in
    the last layer). `attn_bias` stays None and `fast_attention` True: the mask follows from explicit positions.
    """
    return {
        "collect": False,
        "check": False,
        "selector": "value_deviation",
        "check_layers": [1],
        "recomp_ratio": 0.16,
        "recomp_ratios": None,
        "suffix_len": None,
        "imp_indices": None,
        "org_seq_len": None,
        "attn_bias": None,
        "fast_attention": True,
        "original_slot_mapping": None,
        "our_slot_mapping": None,
        "kv_cache_dtype": kv_cache_dtype,
    }


def plan_from_old_kvs(
    metadata: dict[str, Any],
    old_kvs: Sequence[Sequence[torch.Tensor]],
    prompt_token_ids: Sequence[int],
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    last_collected: Sequence[int] = (),
    kv_scales: Sequence[KVScales | None] = (),
) -> BlendPlan:
    """Return the blend that `check=True` asks for. Raises ValueError that names layer and lengths if `old_kvs` does not
    fit.

    `old_kvs[layer]` is [K before RoPE, V], each [tokens, kv_heads * head_dim] or [tokens, kv_heads, head_dim], for the
    first `tokens` positions of the prompt: all of it, or all but (part of) the suffix. `kv_scales` are those of the
    layers' pages, if there are any.
    """
    n = len(prompt_token_ids)
    if not isinstance(old_kvs, Sequence) or len(old_kvs) != num_layers:
        given = len(old_kvs) if isinstance(old_kvs, Sequence) else type(old_kvs).__name__
        raise ValueError(f"old_kvs has {given} layers, the model has {num_layers}: give [K, V] for every layer")
    pairs = [_check_pair(pair, layer) for layer, pair in enumerate(old_kvs)]
    covered = len(pairs[0][0])
    layers = [_check_layer(pair, layer, covered, num_kv_heads, head_dim) for layer, pair in enumerate(pairs)]
    for layer, scales in enumerate(kv_scales):
        if scales is not None:
            k, v = layers[layer]
            layers[layer] = scaled(k, scales.k.reciprocal()), scaled(v, scales.v.reciprocal())
    suffix_len = metadata.get("suffix_len")
    if suffix_len is None:
        suffix_len = max(1, n - covered, _common_suffix(prompt_token_ids, last_collected))
    if not isinstance(suffix_len, int) or not 1 <= suffix_len <= n:
        raise ValueError(f"suffix_len={suffix_len!r} must be between 1 and the prompt's {n} tokens")
    if not n - suffix_len <= covered <= n:
        raise ValueError(
            f"old_kvs covers {covered} tokens (layer 0), but the prompt has {n}, of which the last {suffix_len} "
            f"(suffix_len) are computed anyway: give between {n - suffix_len} and {n} rows per layer. A prompt "
            "that was decoded to text and encoded again often differs in length: pass prompt_token_ids instead"
        )
    ratios, ratio = metadata.get("recomp_ratios"), metadata.get("recomp_ratio")
    check_ratio("recomp_ratio", ratio)
    selector = make_selector(metadata.get("selector") or "value_deviation")
    if selector.fixed_ratio is not None:
        ratio = None  # recomp_ratio always holds a number, which such a selector does not use
    k, v = (torch.stack([layer[i][: n - suffix_len] for layer in layers]) for i in (0, 1))
    segments = [Segment(0, ChunkKV(k, v), found_in="old_kvs")] if n > suffix_len else []
    return make_plan(
        segments,
        prompt_token_ids,
        n - suffix_len,
        selector,
        ratio,
        metadata.get("check_layers") or [1],
        ratios or None,
        num_layers,
    )


def _common_suffix(prompt: Sequence[int], question: Sequence[int]) -> int:
    """Return how many trailing tokens the prompt shares with the last one collected: scripts end with the question.

    A collected prompt as long as this one is not a question, so it shares none.
    """
    if len(question) >= len(prompt):
        return 0
    shared = 0
    while shared < len(question) and question[-1 - shared] == prompt[-1 - shared]:
        shared += 1
    return shared


def _check_pair(pair: Sequence[torch.Tensor], layer: int) -> Sequence[torch.Tensor]:
    if len(pair) != 2:
        raise ValueError(f"old_kvs[{layer}] must be [K, V], got {len(pair)} entries")
    for name, tensor in zip("KV", pair, strict=True):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dim() == 0:
            found = tensor.dtype if isinstance(tensor, torch.Tensor) else tensor
            raise ValueError(f"old_kvs[{layer}]: {name} is {found}, not a floating-point tensor with a row per token")
    return pair


def _check_layer(
    pair: Sequence[torch.Tensor], layer: int, covered: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    checked = []
    for name, tensor in zip("KV", pair, strict=True):
        width = tensor[0].numel() if len(tensor) else num_kv_heads * head_dim
        if len(tensor) != covered or width != num_kv_heads * head_dim:
            raise ValueError(
                f"old_kvs[{layer}]: {name} is {list(tensor.shape)}, expected [{covered}, {num_kv_heads * head_dim}] "
                f"(tokens of layer 0, kv_heads * head_dim)"
            )
        checked.append(tensor.reshape(covered, num_kv_heads, head_dim))
    return checked[0], checked[1]
