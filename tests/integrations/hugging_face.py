"""The demo model in plain transformers: what every integration is compared with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "inputs" / "demo-model")
PROMPTS = ["The city of Viaxvias lies in", "Question: Who runs the town hall?\nAnswer:"]
MAX_TOKENS = 8


@cache
def _loaded(name: str) -> tuple[Any, Any]:
    return AutoTokenizer.from_pretrained(name), AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)


@cache
def greedy_tokens(prompt: str, name: str = MODEL) -> list[int]:
    """Return the tokens that greedy decoding of a model puts after a prompt, with the one that ends them, if any."""
    tokenizer, model = _loaded(name)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
    return [int(token) for token in output[0, ids.shape[1] :]]


def greedy(prompt: str, name: str = MODEL) -> str:
    """Return their text, without the end: transformers leaves out special tokens only, vLLM any token that ends."""
    tokenizer, model = _loaded(name)
    tokens, ends = greedy_tokens(prompt, name), model.generation_config.eos_token_id
    if tokens[-1] in (ends if isinstance(ends, list) else [ends]):
        tokens = tokens[:-1]
    return str(tokenizer.decode(tokens, skip_special_tokens=True))
