"""Measure small steps with prompts or blends launched kernel by kernel and replayed as CUDA graphs, in pairs.

    bash scripts/build_cuda.sh && python -m benchmarks.step_graphs_gpu --output step_graphs.json

Two engines with random weights in the shape of a 7B model, bf16, share the GPU: one with `max_cudagraph_capture_size`
of --rows, one without. They take turns at the same prompts, so both see the same machine. A time is that of
`LLM.generate` for one token, from the call to the output. The work:

- a follow-up: 32 new tokens behind 4,064 that the prefix cache holds;
- a blend of 8 passages of 512 tokens whose KV is stored (synthetic text), by several rules.

Prints the medians in ms and the median of the paired ratios with a bootstrap interval of 95%, and what the graphs cost:
seconds to start and GiB. --output keeps every sample.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.engine_gpu import CHUNK, ids, load
from benchmarks.first_token import about, compare, make_prompt
from benchmarks.samples import record
from benchmarks.shapes import MISTRAL_7B
from vllm_blend import LLM, SamplingParams
from vllm_blend.worker.step_graphs import DEFAULT_ROWS

CONTEXT, NEW = 4064, 32
WARM_UP = 3  # turns that are not counted: they store the chunks and the context
RULES: tuple[tuple[str, float], ...] = (
    ("none", 0.0),
    ("first_tokens", 0.08),
    ("first_tokens", 0.15),
    ("question_attention", 0.08),
    ("question_attention", 0.15),
    ("question_attention(mean_shift=0)", 0.15),
)
LAUNCHED, REPLAYED = "launched", "replayed"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=DEFAULT_ROWS, help="tokens of the largest step that is replayed")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the samples")
    args = parser.parse_args(argv)
    common: dict[str, Any] = {"enable_blending": True, "blend_chunk_cache_gib": 4, "num_gpu_blocks_override": 4096}
    engines, costs = dict[str, LLM](), dict[str, dict[str, float]]()
    for name, rows in ((LAUNCHED, 0), (REPLAYED, args.rows)):
        before, start = torch.cuda.memory_reserved(), time.perf_counter()
        engines[name] = load(MISTRAL_7B, max_cudagraph_capture_size=rows, max_model_len=8192, **common)
        gib = (torch.cuda.memory_reserved() - before) / 2**30
        costs[name] = {"seconds to start": time.perf_counter() - start, "GiB": gib}
    samples = dict[str, dict[str, list[float]]]()
    for work, prompts in works(engines[LAUNCHED], args.seed, WARM_UP + args.repeats):
        samples[work] = take_turns(engines, prompts)
        for name, own in samples[work].items():
            record(f"{work}, {name}", own)
        print(table(samples)[-1], flush=True)
    print("\n".join([*table(samples), json.dumps(costs)]))
    if args.output:
        said = about(engines[REPLAYED]) | {"rows": args.rows}
        args.output.write_text(json.dumps({"about": said, "costs": costs, "samples": samples}) + "\n")


def table(samples: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the Markdown table of medians and paired ratios."""
    lines = ["| work | launched, ms | replayed, ms | replayed / launched |", "|---|---:|---:|---:|"]
    for work, times in samples.items():
        medians = " | ".join(f"{1e3 * statistics.median(times[name]):.2f}" for name in (LAUNCHED, REPLAYED))
        lines.append(f"| {work} | {medians} | {compare(times[REPLAYED], times[LAUNCHED], 0)} |")
    return lines


def works(llm: LLM, seed: int, count: int) -> Iterator[tuple[str, list[Any]]]:
    """Return every kind of work with `count` prompts."""
    rng = Random(seed)
    context = ids(rng, CONTEXT, 32000)
    follow_ups: list[Any] = [{"prompt_token_ids": context + ids(rng, NEW, 32000)} for _ in range(count)]
    yield f"follow-up of {NEW} tokens behind {CONTEXT:,} cached ones", follow_ups
    prompt = make_prompt(llm.get_tokenizer(), 8 * CHUNK + 64, CHUNK, seed)
    for rule, ratio in RULES:
        asked = prompt | {"blend_selector": rule} | ({"blend_recompute_ratio": ratio} if ratio else {})
        yield f"{len(prompt['chunks'])} passages, {rule}{f', {ratio:.0%}' if ratio else ''}", [asked] * count


def take_turns(engines: dict[str, LLM], prompts: Sequence[Any]) -> dict[str, list[float]]:
    """Return seconds to the first token by engine. Raises RuntimeError if a prompt fails."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for turn, prompt in enumerate(prompts):
        for name, llm in engines.items():
            start = time.perf_counter()
            [output] = llm.generate([prompt], params, use_tqdm=False)
            elapsed = time.perf_counter() - start
            if output.error:
                raise RuntimeError(f"{name}: {output.error}")
            if turn >= WARM_UP:
                times[name].append(elapsed)
    return times


if __name__ == "__main__":
    main()
