"""`vllm.transformers_utils.tokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from vllm_blend.models.gguf.names import gguf_path
from vllm_blend.models.gguf.tokenizer import load_gguf_tokenizer
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
    """Load a tokenizer from a folder, a GGUF file or the Hugging Face Hub. It truncates on the left unless told
    otherwise."""
    UNSUPPORTED_ENGINE_ARGS["tokenizer_mode"].check("tokenizer_mode", tokenizer_mode)
    gguf = gguf_path(str(tokenizer_name), revision)
    if gguf is not None:
        tokenizer = load_gguf_tokenizer(gguf)
        tokenizer.truncation_side = options.get("truncation_side", "left")
        return tokenizer
    return AutoTokenizer.from_pretrained(
        tokenizer_name,
        *args,
        trust_remote_code=trust_remote_code,
        revision=revision,
        cache_dir=download_dir,
        **{"truncation_side": "left"} | options,
    )
