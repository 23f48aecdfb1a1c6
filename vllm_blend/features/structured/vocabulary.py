"""The tokens of a model as llguidance needs them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_blend.checks import require
from vllm_blend.features.structured import trial
from vllm_blend.features.structured.library import llguidance


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer as JSON text, the number of tokens, which is that of the model's logits or above, and the tokens that
    end an answer."""

    text: str
    size: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_tokenizer(
        cls, tokenizer: PreTrainedTokenizerBase | None, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> Vocabulary:
        """Return the vocabulary of a model. Raises ValueError if its answers cannot be held to a form."""
        require(
            tokenizer is not None,
            "structured_outputs needs a tokenizer, and the engine has none (skip_tokenizer_init=True): give one",
        )
        assert tokenizer is not None
        require(
            tokenizer.is_fast,
            f"structured_outputs needs a fast tokenizer (a tokenizer.json), not {type(tokenizer).__name__}",
        )
        known = tuple(token for token in eos_token_ids if token < vocab_size)
        require(
            bool(known),
            "structured_outputs needs an end-of-sequence token, and the model has none: name one in its "
            "generation_config.json (eos_token_id)",
        )
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        described["padding"] = described["truncation"] = None
        return cls(json.dumps(described), max(vocab_size, len(tokenizer)), known)

    def description(self) -> dict[str, Any]:
        """Return the arguments of `trial.read_vocabulary` as JSON values."""
        return {"text": self.text, "size": self.size, "eos": list(self.eos_token_ids)}

    @cached_property
    def tokens(self) -> Any:
        """The library's own object. Making it takes about a second for 100,000 tokens."""
        return trial.read_vocabulary(llguidance(), **self.description())
