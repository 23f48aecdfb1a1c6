"""Measure what it saves that `LLM.generate` begins with prompts that fill a step while it still adds the others.

    bash scripts/build_cuda.sh && python -m benchmarks.early_steps --output early_steps.json

One engine with random weights in the shape of a 7B model, bf16, answers batches of blends with 32 tokens each, in turns
with and without that. A time is that of `LLM.generate`, from the call to the last output. Each prompt has 8 passages of
512 tokens out of a pool of 32 whose KV is stored (synthetic text), drawn anew for every batch. Prints the medians as
requests per second and the median of the paired ratios of time with a bootstrap interval of 95%.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from benchmarks.engine_gpu import CHUNK, load
from benchmarks.first_token import PREFIX_TOKENS, WHOLE_BUDGET, about, compare
from benchmarks.ranking import make_passages
from benchmarks.samples import record
from benchmarks.shapes import MISTRAL_7B
from benchmarks.tensor_parallel import ANSWER, PASSAGES, POOL, generate
from vllm_blend import LLM, LLMEngine
from vllm_blend.quality.splits import DEVELOPMENT

WARM_UP = 2  # turns that are not counted: they store the chunks
WORKS: tuple[tuple[int, str, float], ...] = (
    (32, WHOLE_BUDGET, 0.15),
    (128, WHOLE_BUDGET, 0.15),
    (128, WHOLE_BUDGET, 0.08),
    (128, "none", 0.0),
)
WITH, WITHOUT = "with", "without"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for the samples")
    args = parser.parse_args(argv)
    options: dict[str, Any] = {"blend_chunk_cache_gib": 4, "max_num_seqs": 128, "gpu_memory_utilization": 0.85}
    llm = load(MISTRAL_7B, enable_blending=True, **options)
    samples = take_turns(llm, args.seed, args.repeats)
    for work, times in samples.items():
        for name, own in times.items():
            record(f"{work}, {name}", own)
    print("\n".join(table(samples)))
    if args.output:
        args.output.write_text(json.dumps({"about": about(llm), "samples": samples}) + "\n")
    llm.shutdown()


def take_turns(llm: LLM, seed: int, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each batch, by work and by whether steps began early."""
    rng = Random(seed)
    passages, question = make_passages(llm.get_tokenizer(), DEVELOPMENT.random(0), POOL, CHUNK)
    prefix = rng.choices(range(10, 32000), k=PREFIX_TOKENS)
    samples = dict[str, dict[str, list[float]]]()
    for count, rule, ratio in WORKS:
        asked: dict[str, Any] = {"prefix": prefix, "suffix": question, "blend_selector": rule}
        if ratio:
            asked["blend_recompute_ratio"] = ratio
        times = samples[f"{count} blends, {rule}{f', {ratio:.0%}' if ratio else ''}"] = {WITH: [], WITHOUT: []}
        for turn in range(WARM_UP + repeats):
            for name in (WITHOUT, WITH) if turn % 2 == 0 else (WITH, WITHOUT):
                batch: list[Any] = [asked | {"chunks": rng.sample(passages, PASSAGES)} for _ in range(count)]
                if name == WITH:
                    seconds = generate(llm, batch, ANSWER)
                else:
                    with patch.object(LLMEngine, "run_full_steps", lambda _: None):
                        seconds = generate(llm, batch, ANSWER)
                if turn >= WARM_UP:
                    times[name].append(seconds)
    return samples


def table(samples: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the Markdown table of medians and paired ratios."""
    lines = ["| work | without, req/s | with, req/s | time with / without |", "|---|---:|---:|---:|"]
    for work, times in samples.items():
        count = int(work.split()[0])
        rates = " | ".join(f"{count / statistics.median(times[name]):.1f}" for name in (WITHOUT, WITH))
        lines.append(f"| {work} | {rates} | {compare(times[WITH], times[WITHOUT], 0)} |")
    return lines


if __name__ == "__main__":
    main()
