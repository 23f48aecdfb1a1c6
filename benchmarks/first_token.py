"""Measure the first token of rules in pairs: each against `first_tokens`, which looks at nothing.

    python -m benchmarks.first_token --lengths 4096 32000 --ratios 0.08 0.15 --output first_token.json

The model has random weights in the shape of a 7B model, unless --model names another. Passages of 512 tokens are cut
out of generated worlds (synthetic text), and their KV is stored. A time is that of `LLM.generate` for one token, from
the call to the output: looking, placing and the forward pass are all in it. The rules take turns, so all see the same
machine; `question_attention` runs with its mean shift and without. Prints the medians in ms and the median of the
paired ratios with a bootstrap interval of 95%; --output keeps every sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.engine_gpu import CHUNK, load
from benchmarks.passages import make_passages
from benchmarks.samples import record
from benchmarks.shapes import MISTRAL_7B
from vllm_blend import LLM, SamplingParams
from vllm_blend.quality.splits import DEVELOPMENT

BASELINE = "first_tokens"
RULES = (BASELINE, "question_attention(mean_shift=0)", "question_attention", "value_deviation")
WARM_UP = 3  # turns that are not counted: they store the chunks and capture graphs
PREFIX_TOKENS = 32


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model directory (default: random weights in the shape of Mistral-7B)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 32000], help="tokens of a prompt")
    parser.add_argument("--ratios", nargs="+", type=float, default=[0.08, 0.15])
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens of a passage (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the samples")
    args = parser.parse_args(argv)
    options = {"enable_blending": True, "max_num_seqs": 8, "blend_chunk_cache_gib": 24}
    llm = LLM(args.model, enable_blending=True) if args.model else load(MISTRAL_7B, **options)
    samples = []
    print("| tokens | ratio | rule | ms | of first_tokens |\n|---|---|---|---|---|")
    for length in args.lengths:
        prompt = make_prompt(llm.get_tokenizer(), length, args.chunk, args.seed)
        for ratio in args.ratios:
            times = take_turns(llm, ways(prompt, ratio), args.repeats)
            for name, own in times.items():
                record(f"{length} tokens, {ratio:.0%}, {name}", own)
            samples.append({"tokens": length, "ratio": ratio, "seconds": times})
            for name, own in times.items():
                middle = 1e3 * statistics.median(own)
                print(
                    f"| {length} | {ratio:.0%} | {name} | {middle:.2f} | {compare(own, times[BASELINE], args.seed)} |"
                )
    if args.output:
        args.output.write_text(json.dumps({"about": about(llm), "samples": samples}) + "\n")
    llm.shutdown()


def make_prompt(tokenizer: Any, length: int, chunk: int, seed: int) -> dict[str, Any]:
    """Return a prompt of about `length` tokens: a prefix, passages of `chunk` tokens and a question about one."""
    count = max(1, (length - 2 * PREFIX_TOKENS) // chunk)
    passages, question = make_passages(tokenizer, DEVELOPMENT.random(seed), count, chunk)
    prefix = Random(seed).choices(range(10, len(tokenizer)), k=PREFIX_TOKENS)
    return {"prefix": prefix, "chunks": passages, "suffix": question}


def ways(prompt: dict[str, Any], ratio: float) -> dict[str, dict[str, Any]]:
    """Return the prompts that are compared, by the name of their rule."""
    return {rule: prompt | {"blend_selector": rule, "blend_recompute_ratio": ratio} for rule in RULES}


def take_turns(llm: LLM, prompts: dict[str, Any], repeats: int) -> dict[str, list[float]]:
    """Return seconds to the first token by name, `repeats` of each. Raises RuntimeError if a prompt fails."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    times: dict[str, list[float]] = {name: [] for name in prompts}
    for turn in range(WARM_UP + repeats):
        for name, prompt in prompts.items():
            start = time.perf_counter()
            [output] = llm.generate([prompt], params, use_tqdm=False)
            elapsed = time.perf_counter() - start
            if output.error or output.blend is None:
                raise RuntimeError(f"{name}: {output.error or 'the prompt was not blended'}")
            if turn >= WARM_UP:
                times[name].append(elapsed)
    return times


def compare(own: Sequence[float], baseline: Sequence[float], seed: int) -> str:
    """Return the median of the paired ratios and its bootstrap interval."""
    ratios = np.array(own) / np.array(baseline)
    drawn = np.random.default_rng(seed).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(drawn, 1), [2.5, 97.5])
    return f"{np.median(ratios):.3f} ({low:.3f} to {high:.3f})"


def about(llm: LLM) -> dict[str, str]:
    """Return what the samples were taken on."""
    config = llm.llm_engine.hf_config
    shape = f"{config.num_hidden_layers} layers, hidden {config.hidden_size}"
    device = llm.llm_engine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {"device": name, "shape": shape, "dtype": str(llm.llm_engine.model_config.dtype)}


if __name__ == "__main__":
    main()
