"""Answer prompts by transformers, with KV evicted by presses of kvpress.

An interpreter that has kvpress runs this file. kvpress needs an older transformers than this project does, so nothing
of this project is imported here.

Standard input is one JSON object: `model`, `prompts` (lists of token ids), `max_tokens`, `stop` (text that ends an
answer) and `runs`, each [name of a press or null, share of the KVs that it keeps]. Standard output is a line of JSON
with the versions, then one for each run with its answers: [text, token ids] of every prompt.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils.logging import disable_progress_bar


def main() -> None:
    job = json.load(sys.stdin)
    disable_progress_bar()  # standard error is for errors
    runs = [(None if name is None else getattr(kvpress, name), kept) for name, kept in job["runs"]]
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    print(json.dumps({name: version(name) for name in ("kvpress", "transformers")}), flush=True)
    for press, kept in runs:
        answers = []
        for number, ids in enumerate(job["prompts"]):
            torch.manual_seed(number)  # for a press that draws
            evict = nullcontext() if press is None else press(compression_ratio=1 - kept)(model)
            answers.append(answer(model, tokenizer, ids, evict, job["max_tokens"], job["stop"]))
        print(json.dumps(answers), flush=True)


@torch.inference_mode()
def answer(model: Any, tokenizer: Any, ids: list[int], evict: Any, max_tokens: int, stop: str) -> tuple[str, list[int]]:
    """Return the greedy answer: its text and token ids. The first token comes from the prefill, which sees all KVs."""
    cache, found = DynamicCache(), list[int]()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    with evict:
        logits = model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1).logits
    while True:
        found.append(int(logits[0, -1].argmax()))
        text = tokenizer.decode(found, skip_special_tokens=True)
        if found[-1] in ends or stop in text or len(found) == max_tokens:
            return text.partition(stop)[0], found
        at = torch.tensor([[len(ids) + len(found) - 1]])  # positions do not shrink with the cache
        logits = model(torch.tensor([[found[-1]]]), past_key_values=cache, position_ids=at).logits


if __name__ == "__main__":
    main()
