"""The sampling parameters of vLLM (0.11 to 0.22) that `SamplingParams` does not have."""

from __future__ import annotations

from vllm_blend.unsupported import Unsupported

UNSUPPORTED_SAMPLING_PARAMS: dict[str, Unsupported] = {
    "best_of": Unsupported(None, "give n, and choose among the completions yourself", (1,)),
    "truncate_prompt_tokens": Unsupported(None, "cut the prompt's token ids before you give them"),
    "extra_args": Unsupported(None, "there are no plugins that could read it", ({},)),
    "logprob_token_ids": Unsupported(None, "give logprobs=-1 and take what you need"),
    "skip_clone": Unsupported(False, "the engine decides when it copies parameters", (True,)),
    "skip_reading_prefix_cache": Unsupported(None, "give enable_prefix_caching=False to the engine", (False,)),
    "thinking_token_budget": Unsupported(None, "reasoning is not told from the answer: give max_tokens"),
    "repetition_detection": Unsupported(None, "give repetition_penalty, or max_tokens"),
    "routed_experts_prompt_start": Unsupported(0, "the experts that tokens were routed to are not returned"),
}
"""vLLM's name -> its default there, and why other values are refused or what to do instead."""
