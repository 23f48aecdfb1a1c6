"""Checks of a new request, before anything of it is queued: each raises an error that says what to do instead."""

from __future__ import annotations

from vllm_blend.checks import is_whole
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.sampling_params import SamplingParams


def check_priority(priority: int, policy: str) -> None:
    """Raise TypeError or ValueError for a priority that the scheduling policy cannot use."""
    if not is_whole(priority):
        raise TypeError(f"priority={priority!r} must be an integer, not {type(priority).__name__}")
    if priority and policy != "priority":
        raise ValueError(
            f"priority={priority}, but the engine serves requests in order of arrival: give "
            'scheduling_policy="priority" to the engine, or leave the priority out'
        )


def check_logprobs(params: SamplingParams, max_logprobs: int, vocab_size: int) -> None:
    """Raise ValueError where more log-probabilities are asked for than the engine allows; -1 allows any number."""
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and 0 <= max_logprobs < (vocab_size if count == -1 else count):
            raise ValueError(f"{name}={count}, but the engine allows {max_logprobs}: lower it, or raise max_logprobs")


def check_length(parsed: ParsedPrompt, max_model_len: int) -> None:
    """Raise ValueError for a prompt that leaves no room for a token of an answer."""
    n = len(parsed.token_ids)
    if n >= max_model_len:
        raise ValueError(
            f"the prompt has {n} tokens, but max_model_len={max_model_len} must hold it and at least one "
            "more: shorten the prompt, or raise max_model_len where the model allows it"
        )


def check_chunk_settings(parsed: ParsedPrompt, blends: bool, moves_chunks: bool) -> None:
    """Raise ValueError for settings of a prompt's chunks that the engine would not read."""
    if parsed.chunk_ranking and not moves_chunks:
        raise ValueError(
            "the prompt has chunk_ranking, but the engine's chunks do not move while decoding: give offload_mode "
            "to the engine, or leave it out"
        )
    if not blends and (parsed.blend_selector is not None or parsed.blend_recompute_ratio is not None):
        raise ValueError(
            "the prompt has blend_selector or blend_recompute_ratio, but the engine does not blend: give "
            "enable_blending=True to the engine, or leave them out"
        )


def check_nothing_needs_every_token(params: SamplingParams, collects: bool) -> None:
    """Raise ValueError where a blended prompt is to give what only a prompt that is computed whole has."""
    if params.prompt_logprobs is not None:
        raise ValueError(
            "prompt_logprobs needs every prompt token computed, which a blend avoids: leave prompt_logprobs "
            "out, or give the prompt as plain text"
        )
    if collects:
        raise ValueError(
            "cache_fuse_metadata: collect and check (or a chunked prompt) exclude each other, as a blend does not "
            "compute the K and V of every prompt token: set collect to False first"
        )
