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


def greedy(prompt: str, name: str = MODEL) -> str:
    """Return the text that greedy decoding of a model puts after a prompt."""
    tokenizer, model = _loaded(name)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
    return str(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
