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
from typing import Any
from unittest.mock import patch

from benchmarks.engine_gpu import load
from benchmarks.first_token import about, compare
from benchmarks.samples import record
from benchmarks.shapes import MISTRAL_7B
from benchmarks.tensor_parallel import ANSWER, generate, make_prompts
from vllm_blend import LLM, LLMEngine

WARM_UP = 2  # turns that are not counted: they store the chunks
WORKS: tuple[tuple[int, str, float], ...] = (
    (32, "question_attention", 0.15),
    (128, "question_attention", 0.15),
    (128, "question_attention", 0.08),
    (128, "none", 0.0),
)
WITH, WITHOUT = "with", "without"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--output", type=Path, help="JSON file for the samples")
    args = parser.parse_args(argv)
    options: dict[str, Any] = {"blend_chunk_cache_gib": 4, "max_num_seqs": 128, "gpu_memory_utilization": 0.85}
    llm = load(MISTRAL_7B, enable_blending=True, **options)
    samples = take_turns(llm, args.repeats)
    for work, times in samples.items():
        for name, own in times.items():
            record(f"{work}, {name}", own)
    print("\n".join(table(samples)))
    if args.output:
        args.output.write_text(json.dumps({"about": about(llm), "samples": samples}) + "\n")
    llm.shutdown()


def take_turns(llm: LLM, repeats: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each batch, by work and by whether steps began early."""
    samples = dict[str, dict[str, list[float]]]()
    for count, rule, ratio in WORKS:
        batches = iter(make_prompts(llm.get_tokenizer(), 2 * (WARM_UP + repeats), count, rule, ratio))
        times = samples[f"{count} blends, {rule}{f', {ratio:.0%}' if ratio else ''}"] = {WITH: [], WITHOUT: []}
        for turn in range(WARM_UP + repeats):
            for name in (WITHOUT, WITH) if turn % 2 == 0 else (WITH, WITHOUT):
                batch = next(batches)
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
