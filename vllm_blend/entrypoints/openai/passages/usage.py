"""What a request's prompt was made of, in tokens: the `prompt_tokens_details` of its usage."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from vllm_blend.engine.metrics import FOUND_IN
from vllm_blend.outputs import RequestOutput


class PromptTokensDetails(TypedDict):
    """Tokens of prompts. Everything is a number, 0 where there is nothing to count.

    `cached_tokens` were found and used as they were, wherever that was; `tiers` says where, and adds up to them. Of
    these, `reused_tokens` are those of passages. `stored_tokens` were computed for the store first, as nothing of their
    passages was found, and then used as they were. `recomputed_tokens` are those that the model computed in the
    prompt's place, again or for the first time: with the cached and the stored ones they make up the prompt.
    """

    cached_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    stored_tokens: int
    tiers: dict[str, int]


def usage_details(outputs: RequestOutput | Iterable[RequestOutput]) -> PromptTokensDetails:
    """Return how the prompts of a request, or of several, were computed."""
    given = [outputs] if isinstance(outputs, RequestOutput) else list(outputs)
    tiers = dict.fromkeys(FOUND_IN, 0)
    cached = stored = total = 0
    for output in given:
        for where, count in output.num_found_tokens.items():
            tiers[where] = tiers.get(where, 0) + count
        cached += output.num_cached_tokens or 0
        stored += 0 if output.blend is None else output.blend.num_encoded_tokens
        total += len(output.prompt_token_ids)
    return PromptTokensDetails(
        cached_tokens=cached,
        reused_tokens=cached - tiers["prefix_cache"],
        recomputed_tokens=total - cached - stored,
        stored_tokens=stored,
        tiers=tiers,
    )
