"""Tokens and requests since a server started, of all tenants or of one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm_blend.entrypoints.openai.passages.usage import usage_details
from vllm_blend.outputs import RequestOutput


@dataclass
class TokenCounts:
    """Tokens of prompts that have had a first token, and of their answers, in the words of the usage field
    (`usage_details`). `found` has the cached ones by where they were found."""

    prompt: int = 0
    cached: int = 0
    reused: int = 0
    stored: int = 0
    recomputed: int = 0
    generated: int = 0
    found: Counter[str] = field(default_factory=Counter)

    def count_prompt(self, output: RequestOutput) -> None:
        """Count the prompt of a request."""
        details = usage_details(output)
        self.prompt += len(output.prompt_token_ids)
        self.cached += details["cached_tokens"]
        self.reused += details["reused_tokens"]
        self.stored += details["stored_tokens"]
        self.recomputed += details["recomputed_tokens"]
        self.found.update(details["tiers"])


@dataclass
class TenantCounts(TokenCounts):
    """What a tenant has used."""

    running: int = 0  # prompts that run or wait now
    finished: int = 0  # prompts that were answered
    failed: int = 0
    refused: int = 0
