"""`vllm.transformers_utils.tokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm_blend.unsupported.engine_args import UNSUPPORTED_ENGINE_ARGS

__all__ = ["get_tokenizer"]


def get_tokenizer(
    tokenizer_name: str | Path,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
    **options: Any,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hugging Face Hub. It truncates on the left unless told otherwise."""
    UNSUPPORTED_ENGINE_ARGS["tokenizer_mode"].check("tokenizer_mode", tokenizer_mode)
    return AutoTokenizer.from_pretrained(
        tokenizer_name,
        *args,
        trust_remote_code=trust_remote_code,
        revision=revision,
        cache_dir=download_dir,
        **{"truncation_side": "left"} | options,
    )
