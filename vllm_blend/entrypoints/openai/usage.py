"""The `usage` of an answer."""

from __future__ import annotations

from vllm_blend.entrypoints.openai.passages import usage_details
from vllm_blend.entrypoints.openai.protocol.common import PromptTokensDetails, UsageInfo
from vllm_blend.outputs import RequestOutput


class UsageCounter:
    """Counts the tokens of a call, from whole outputs or from those of a stream."""

    def __init__(self) -> None:
        self.num_completion_tokens = 0
        self._prompts: dict[int, RequestOutput] = {}

    def add(self, index: int, output: RequestOutput) -> None:
        """Count an output of prompt `index`: the tokens in it are new ones."""
        self._prompts[index] = output
        self.num_completion_tokens += sum(len(completion.token_ids) for completion in output.outputs)

    def usage(self) -> UsageInfo:
        """Return the usage so far."""
        num_prompt_tokens = sum(len(output.prompt_token_ids) for output in self._prompts.values())
        return UsageInfo(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self.num_completion_tokens,
            total_tokens=num_prompt_tokens + self.num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails.model_validate(usage_details(self._prompts.values())),
        )
