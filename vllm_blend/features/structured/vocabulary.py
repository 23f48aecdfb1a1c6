"""The tokens of a model as llguidance needs them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from vllm_blend.checks import require
from vllm_blend.features.structured import trial
from vllm_blend.features.structured.library import llguidance
from vllm_blend.ops.token_masks import BITS


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer as JSON text, the number of tokens, which is that of the model's logits or above, and the tokens that
    end an answer.

    `eos_token_ids` are special tokens, which no form has. `text_eos_token_ids` are text, such as a newline: they end
    answers that are complete, and are text in all others.
    """

    text: str
    size: int
    eos_token_ids: tuple[int, ...]
    text_eos_token_ids: tuple[int, ...] = ()

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
        described = json.loads(tokenizer.backend_tokenizer.to_str())
        described["padding"] = described["truncation"] = None
        special = {token["id"] for token in described["added_tokens"] if token["special"]}
        known = [token for token in eos_token_ids if token < vocab_size]
        ends = tuple(token for token in known if token in special)
        require(
            bool(ends),
            "structured_outputs needs an end-of-sequence token that is a special token of the tokenizer, and the model "
            "has none: name one in its generation_config.json (eos_token_id)",
        )
        size = max(vocab_size, len(tokenizer))
        return cls(json.dumps(described), size, ends, tuple(token for token in known if token not in special))

    def description(self) -> dict[str, Any]:
        """Return the arguments of `trial.read_vocabulary` as JSON values."""
        return {"text": self.text, "size": self.size, "eos": list(self.eos_token_ids)}

    def ends(self, token: int, is_complete: Callable[[], bool]) -> bool:
        """Return whether a token ends an answer. `is_complete` says whether the answer before it has its form."""
        return token in self.eos_token_ids or (token in self.text_eos_token_ids and is_complete())

    def allow_ends(self, masks: NDArray[np.int32]) -> None:
        """Allow text that ends answers, too, in those packed masks [rows, words] that allow the special tokens."""
        if self.text_eos_token_ids:
            word, bit = divmod(self.eos_token_ids[0], BITS)
            masks[(masks[:, word] >> bit & 1) == 1] |= mask_of(self.text_eos_token_ids, masks.shape[1])

    def mask_of_ends(self, width: int) -> NDArray[np.int32]:
        """Return the packed mask [width] that allows nothing but ends."""
        return mask_of(self.eos_token_ids + self.text_eos_token_ids, width)

    @cached_property
    def tokens(self) -> Any:
        """The library's own object. Making it takes long for a large vocabulary."""
        return trial.read_vocabulary(llguidance(), **self.description())


def mask_of(token_ids: Sequence[int], width: int) -> NDArray[np.int32]:
    """Return the packed mask [width] that allows these tokens."""
    mask = np.zeros(width, np.uint32)
    for token in token_ids:
        mask[token // BITS] |= np.uint32(1 << token % BITS)
    return mask.view(np.int32)
