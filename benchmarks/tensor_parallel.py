"""Measure an engine with one rank and with two, each on a GPU of its own, in turns.

    bash scripts/build_cuda.sh && python -m benchmarks.tensor_parallel --output tensor_parallel.json [--large]

Weights are random, in the shape of a 7B model, bf16; the engines answer the same prompts. Both numbers of ranks are
measured --rounds times, in turns, so that both see the same machine; a figure is the median over all rounds. The work:

- a decode step of 64 requests at 2,048 tokens each (host time of the step, to the drawn tokens);
- a full prefill of 32,000 tokens (wall time of `LLM.generate` for one token);
- 32 and 128 blends of 8 x 512 tokens at once, of which `question_attention` recomputes 15%, with 32 tokens of answer
  each (wall time of `LLM.generate`; at most 64 run). Passages come from a pool whose KV is stored: synthetic text, each
  prompt in another order.

--large also loads the shape of a 70B model on two GPUs, and says what memory it takes and how fast it answers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.engine_gpu import CHUNK, decode, ids, load
from benchmarks.first_token import PREFIX_TOKENS
from benchmarks.passages import make_passages
from benchmarks.shapes import LLAMA_33_70B, MISTRAL_7B
from benchmarks.side.report import interval
from vllm_blend import LLM, SamplingParams
from vllm_blend.quality.splits import DEVELOPMENT

RANKS = (1, 2)
PREFILL, RATIO, BLENDS, ANSWER = 32000, 0.15, (32, 128), 32
POOL, PASSAGES = 32, 8  # passages in all, and of each prompt
BATCH, CONTEXT = 64, 2048
WARM_UP = 2
Samples = dict[str, list[float]]  # seconds of each row


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="of each number of ranks (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each row in a round (default: %(default)s)")
    parser.add_argument("--large", action="store_true", help="load the shape of a 70B model too")
    parser.add_argument("--output", type=Path, help="JSON file for the samples")
    args = parser.parse_args(argv)
    if torch.cuda.device_count() < max(RANKS):
        parser.error(f"needs {max(RANKS)} GPUs, and there are {torch.cuda.device_count()}")
    samples: dict[int, Samples] = {size: {} for size in RANKS}
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    report: dict[str, Any] = {"about": about, "samples": samples, "large": {}}

    def write() -> None:  # after each part: a run that is interrupted keeps what it has
        if args.output:
            args.output.write_text(json.dumps(report, indent=1) + "\n")

    for _ in range(args.rounds):
        for size in RANKS:
            for name, seconds in measure(size, args.repeats).items():
                samples[size].setdefault(name, []).extend(seconds)
            write()
        print("\n".join(table(samples)), flush=True)
    if args.large:
        report["large"] = serve_large()
        print(f"\n70B shape on {max(RANKS)} GPUs: {json.dumps(report['large'])}")
        write()


def measure(size: int, repeats: int) -> Samples:
    """Return the samples of one engine, by row."""
    rng, samples = Random(0), Samples()
    options: dict[str, Any] = {"tensor_parallel_size": size, "max_num_seqs": BATCH}
    with load(MISTRAL_7B, enable_prefix_caching=False, max_num_batched_tokens=32768, **options) as llm:
        steps = [decode(llm, rng, BATCH, CONTEXT) / 1e3 for _ in range(repeats)]
        samples[f"decode step, batch {BATCH} at {CONTEXT}"] = steps
        whole: list[Any] = [{"prompt_token_ids": ids(rng, PREFILL, 32000)} for _ in range(WARM_UP + repeats)]
        samples[f"full prefill, {PREFILL}"] = [generate(llm, [prompt], 1) for prompt in whole][WARM_UP:]
    with load(MISTRAL_7B, enable_blending=True, blend_chunk_cache_gib=4, **options) as llm:
        for count in BLENDS:
            prompts = make_prompts(llm.get_tokenizer(), WARM_UP + repeats, count)
            name = f"{count} blends of {PASSAGES} x {CHUNK} at {RATIO:.0%}, {ANSWER} tokens each"
            samples[name] = [generate(llm, batch, ANSWER) for batch in prompts][WARM_UP:]
    return samples


def make_prompts(
    tokenizer: Any, batches: int, count: int, rule: str = "question_attention", ratio: float = RATIO
) -> list[list[Any]]:
    """Return batches of `count` prompts that share a pool of passages, in orders of their own."""
    rng = Random(1)
    passages, question = make_passages(tokenizer, DEVELOPMENT.random(0), POOL, CHUNK)
    prefix = rng.choices(range(10, len(tokenizer)), k=PREFIX_TOKENS)
    asked = {"prefix": prefix, "suffix": question, "blend_selector": rule, "blend_recompute_ratio": ratio}
    return [[asked | {"chunks": rng.sample(passages, PASSAGES)} for _ in range(count)] for _ in range(batches)]


def generate(llm: LLM, prompts: list[Any], max_tokens: int) -> float:
    """Return the seconds that a batch takes. Raises RuntimeError if a prompt fails."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    for output in outputs:
        if output.error:
            raise RuntimeError(output.error)
    return seconds


def serve_large() -> dict[str, float]:
    """Return how long a 70B shape takes to load and to work, and the memory of the first GPU, in GB."""
    start = time.perf_counter()
    options: dict[str, Any] = {"max_model_len": 8192, "max_num_seqs": 8, "max_num_batched_tokens": 4096}
    with load(LLAMA_33_70B, tensor_parallel_size=max(RANKS), gpu_memory_utilization=0.97, **options) as llm:
        loaded, rng = time.perf_counter() - start, Random(0)
        made: Callable[[], list[Any]] = lambda: [{"prompt_token_ids": ids(rng, 4096, 32000)}]  # noqa: E731
        prefill = statistics.median([generate(llm, made(), 1) for _ in range(WARM_UP + 3)][WARM_UP:])
        return {
            "seconds to load": loaded,
            "full prefill of 4096, ms": 1e3 * prefill,
            "decode step, batch 8 at 1024, ms": decode(llm, rng, 8, 1024),
            "memory of rank 0, GB": torch.cuda.max_memory_allocated() / 1e9,
        }


def table(samples: dict[int, Samples]) -> list[str]:
    """Return the Markdown table of medians, and of how many times sooner two ranks are done, with an interval of 95%
    (bootstrap over the samples of either side)."""
    one, two = (samples[size] for size in RANKS)
    lines = ["| work | one GPU, ms | two GPUs, ms | one / two |", "|---|---:|---:|---:|"]
    for name in one:
        first, second = (1e3 * statistics.median(each[name]) for each in (one, two))
        low, high = interval([two[name]], [one[name]])
        lines.append(f"| {name} | {first:.1f} | {second:.1f} | {first / second:.2f} ({low:.2f} to {high:.2f}) |")
    return lines


if __name__ == "__main__":
    main()
