"""Say where the time of a call goes on a GPU: what its kernels take, by kind, and when the GPU waits for the host.

    bash scripts/build_cuda.sh && python -m benchmarks.gpu_timeline --output gpu_timeline.json

An engine with random weights in the shape of a 7B model, bf16, answers prompts of 8 passages of 512 tokens whose KV is
stored (synthetic text), by several rules, alone and many at once; and it decodes batches, as does one in the shape of a
0.6B model. Each call of `LLM.generate` is timed --repeats times as it is, as often behind a kernel that does nothing
for a while, and as often under torch's profiler, which records kernels and copies (CUPTI) and slows the host: so the
time is that of the calls without it, and the shares are those of the calls with it. `sampling` and `kvc` are steps of
requests that all decode: of 256 with a temperature, and of 64 whose KV is compressed. `mix` is the row of that name of
`side_by_side`, once under the profiler: its requests come at once and end one after another, over a thousand steps.

- `queued`: from the end of that kernel to the end of the last one. The host has launched everything meanwhile (in
  batches that decode, only the first step), so this is the call's time if the host took none.
- `first`: from the call to the first kernel; `idle`: later times without any kernel; `last`: from the last kernel to
  the return. A copy is a kernel, too.
- Kernels that run at once count for each kind, so kinds may add up to more than `busy`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.engine_gpu import CHUNK, begin_decoding, ids, load
from benchmarks.first_token import about, make_prompt
from benchmarks.gpu_account import KINDS, Account, check_profiler, cycles_of, profiled, queued
from benchmarks.shapes import LLAMA_31_8B, MISTRAL_7B, QWEN3_06B
from benchmarks.side.rows import gpu
from benchmarks.tensor_parallel import generate, make_prompts
from vllm_blend import LLM, SamplingParams

WARM_UP = 3  # calls that are not counted: they store the chunks
PARTS = ("7b", "0.6b", "sampling", "mix", "kvc")
STEPS = 32  # of requests that all decode, in a sample
CACHED: dict[str, Any] = {"enable_prefix_caching": True, "gpu_memory_utilization": 0.85}
DECODED = 16  # tokens of batches that decode: the profiler takes long over more
AHEAD_MS = 100  # how long the kernel that does nothing keeps the GPU


@dataclass(frozen=True)
class Work:
    """Calls of `generate`, each with prompts of its own, and the tokens of an answer."""

    name: str
    batches: list[list[Any]]
    tokens: int


def blends(llm: LLM, calls: int) -> Iterator[Work]:
    """Return the works with stored passages."""
    prompt = make_prompt(llm.get_tokenizer(), 8 * CHUNK + 64, CHUNK, 0)
    for rule, ratio in (
        ("none", 0.0),
        ("first_tokens", 0.08),
        ("first_tokens", 0.15),
        ("question_attention", 0.08),
        ("question_attention", 0.15),
        ("question_attention(mean_shift=0)", 0.15),
    ):
        asked = prompt | {"blend_selector": rule, "blend_recompute_ratio": ratio}
        yield Work(f"one prompt of 8 passages, {rule}, {ratio:.0%}", [[asked]] * calls, 1)
    for rule, ratio in (
        ("none", 0.0),
        ("first_tokens", 0.15),
        ("question_attention", 0.08),
        ("question_attention", 0.15),
    ):
        batches = make_prompts(llm.get_tokenizer(), calls, 64, rule, ratio)
        yield Work(f"64 such prompts at once, {rule}, {ratio:.0%}, 32 tokens out", batches, 32)


def decodes(name: str, sizes: Sequence[tuple[int, int]], calls: int) -> Iterator[Work]:
    """Return the works of one batch each: (requests, tokens of their prompts), which the prefix cache has."""
    rng = Random(0)
    for batch, context in sizes:
        same = [{"prompt_token_ids": ids(rng, context, 32000)} for _ in range(batch)]
        yield Work(f"{DECODED} tokens of {batch} at {context}, {name}", [same] * calls, DECODED)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="calls of each work, with the profiler and without")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some of the work")
    parser.add_argument("--without-profiler", action="store_true", help="time the calls, and account for none")
    parser.add_argument("--output", type=Path, help="JSON file for the samples")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} must be at least 1")
    if not args.without_profiler:
        check_profiler()  # before anything is loaded, and before the engine's graphs
    calls = WARM_UP + 3 * args.repeats
    samples: dict[str, dict[str, Any]] = {}
    print("\n".join(HEAD))
    if "7b" in args.only:
        blending: dict[str, Any] = {"enable_blending": True, "blend_chunk_cache_gib": 4, "max_model_len": 8192}
        with load(MISTRAL_7B, max_num_seqs=128, **blending, **CACHED) as llm:
            sizes = ((1, 4096), (32, 4096), (128, 2048))
            measure(llm, [*blends(llm, calls), *decodes("7B", sizes, calls)], args, samples)
    if "0.6b" in args.only:
        with load(QWEN3_06B, max_num_seqs=256, max_model_len=4096, **CACHED) as llm:
            sizes = ((32, 512), (128, 512), (256, 512))
            measure(llm, list(decodes("0.6B", sizes, calls)), args, samples)
    if "sampling" in args.only:
        with load(QWEN3_06B, max_num_seqs=256, max_model_len=4096, **CACHED) as llm:
            measure_steps(llm, "256 at 512, temperature 0.6, 0.6B", 256, 512, 0.6, args, samples)
    if "mix" in args.only:
        uncached: dict[str, Any] = {"enable_prefix_caching": False, "gpu_memory_utilization": 0.85}
        with load(QWEN3_06B, max_num_seqs=256, max_model_len=4096, **uncached) as llm:
            measure_mix(llm, next(row.work for row in gpu().rows if row.name == "mix"), args, samples)
    for kept in (8, 64) if "kvc" in args.only else ():
        compressed: dict[str, Any] = {"enable_kvc": True, "target_compression_rate": 1 / kept}
        with load(LLAMA_31_8B, max_model_len=8192, max_num_seqs=64, gpu_memory_utilization=0.85, **compressed) as llm:
            measure_steps(llm, f"64 at 4000, KV-Compress {kept}x, 8B", 64, 4000, 0.0, args, samples)


def measure(llm: LLM, works: Sequence[Work], args: argparse.Namespace, samples: dict[str, dict[str, Any]]) -> None:
    """Measure every work."""
    cycles, device = cycles_of(AHEAD_MS), llm.llm_engine.device
    for work in works:
        run = calls_of(llm, work)
        for _ in range(WARM_UP):
            run()
        wall = [1e3 * run() for _ in range(args.repeats)]
        ahead = [queued(run, cycles) for _ in range(args.repeats)]
        accounts = [] if args.without_profiler else [profiled(device, run) for _ in range(args.repeats)]
        report(llm, work.name, wall, ahead, accounts, args.output, samples)


def calls_of(llm: LLM, work: Work) -> Callable[[], float]:
    """Return a function that makes the next call of a work and returns its seconds."""
    batches = iter(work.batches)
    return lambda: generate(llm, next(batches), work.tokens)


def measure_steps(
    llm: LLM,
    name: str,
    requests: int,
    tokens: int,
    temperature: float,
    args: argparse.Namespace,
    samples: dict[str, dict[str, Any]],
) -> None:
    """Measure steps in which all requests decode, behind prompts of so many tokens."""
    engine, rng = llm.llm_engine, Random(0)
    vocabulary = engine.hf_config.vocab_size
    most = STEPS * (WARM_UP + 2 * args.repeats) + requests  # which the first may have answered when the last begins
    params = SamplingParams(temperature=temperature, max_tokens=most, ignore_eos=True, detokenize=False)
    names = begin_decoding(llm, [ids(rng, tokens, vocabulary) for _ in range(requests)], params)

    def run() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            engine.step()  # ends with reading the tokens of the step before
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        run()
    wall = [1e3 * run() for _ in range(args.repeats)]
    accounts = [] if args.without_profiler else [profiled(engine.device, run) for _ in range(args.repeats)]
    if len(engine.scheduler.running) < requests:
        raise RuntimeError(f"{name}: {requests - len(engine.scheduler.running)} requests did not stay in the batch")
    engine.abort_request(names)
    report(llm, f"{STEPS} steps of {name}", wall, [], accounts, args.output, samples)


def measure_mix(llm: LLM, work: dict[str, Any], args: argparse.Namespace, samples: dict[str, dict[str, Any]]) -> None:
    """Measure requests of random lengths that come at once, drawn anew for each call: a row of kind `batch`."""
    rng, vocabulary, out = Random(0), llm.llm_engine.hf_config.vocab_size, 0

    def run() -> float:
        nonlocal out
        prompts: list[Any] = [
            {"prompt_token_ids": ids(rng, rng.randint(*work["tokens_in"]), vocabulary)} for _ in range(work["requests"])
        ]
        params = [
            SamplingParams(
                temperature=work["temperature"],
                max_tokens=rng.randint(*work["tokens_out"]),
                ignore_eos=True,
                detokenize=False,
            )
            for _ in prompts
        ]
        out = sum(each.max_tokens or 0 for each in params)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    run()
    wall = [1e3 * run() for _ in range(args.repeats)]
    accounts = [] if args.without_profiler else [profiled(llm.llm_engine.device, run)]
    name = f"a mix of {work['requests']}, 0.6B ({out:,} tokens in the last call)"
    report(llm, name, wall, [], accounts, args.output, samples)


def report(
    llm: LLM,
    name: str,
    wall: list[float],
    ahead: list[float],
    accounts: list[Account],
    output: Path | None,
    samples: dict[str, dict[str, Any]],
) -> None:
    """Print the line of a work, and write all samples so far to `output`."""
    samples[name] = {"wall_ms": wall, "queued_ms": ahead, "profiled": [asdict(each) for each in accounts]}
    print(row(name, wall, ahead, accounts), flush=True)
    if output:
        output.write_text(json.dumps({"about": about(llm), "samples": samples}) + "\n", encoding="utf-8")


_COLUMNS = ("wall", "queued", "profiled", "first", "busy", "idle", "last", "kernels", *(kind for kind, _ in KINDS))
HEAD = [f"| work | {' | '.join(_COLUMNS)} |", "|---|" + "---:|" * len(_COLUMNS)]


def row(name: str, wall: Sequence[float], ahead: Sequence[float], accounts: Sequence[Account]) -> str:
    """Return a line of the table: medians in ms, and the number of kernels."""
    parts = [[getattr(each, part) for each in accounts] for part in ("wall", "first", "busy", "idle", "last")]
    kinds = [[each.kinds[kind] for each in accounts] for kind, _ in KINDS]
    cells = [_median(values) for values in (wall, ahead, *parts, *kinds)]
    cells.insert(2 + len(parts), f"{statistics.median(each.num_kernels for each in accounts):.0f}" if accounts else "")
    return f"| {name} | {' | '.join(cells)} |"


def table(samples: dict[str, dict[str, Any]]) -> list[str]:
    """Return the lines of the table of the samples that `main` has written."""
    return HEAD + [
        row(name, each["wall_ms"], each["queued_ms"], [Account(**one) for one in each["profiled"]])
        for name, each in samples.items()
    ]


def _median(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f}" if values else ""


if __name__ == "__main__":
    main()
