"""Say where the time of a call goes on a GPU: what its kernels take, by kind, and when the GPU waits for the host.

    bash scripts/build_cuda.sh && python -m benchmarks.gpu_timeline --output gpu_timeline.json

An engine with random weights in the shape of a 7B model, bf16, answers prompts of 8 passages of 512 tokens whose KV is
stored (synthetic text), by several rules, alone and many at once; and it decodes batches, as does one in the shape of a
0.6B model. Each call of `LLM.generate` is timed --repeats times as it is, as often behind a kernel that does nothing
for a while, and as often under torch's profiler, which records kernels and copies (CUPTI) and slows the host: so the
time is that of the calls without it, and the shares are those of the calls with it. `sampling` and `kvc` are steps of
requests that all decode: of 256 with a temperature, and of 64 whose KV is compressed.

- `queued`: from the end of that kernel to the end of the last one. The host has launched everything meanwhile (in
  batches that decode, only the first step), so this is the call's time if the host took none.
- `first`: from the call to the first kernel; `idle`: later times without any kernel; `last`: from the last kernel to
  the return. A copy is a kernel, too.
- Kernels that run at once count for each kind, so kinds may add up to more than `busy`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine_gpu import CHUNK, begin_decoding, ids, load
from benchmarks.first_token import WHOLE_BUDGET, about, make_prompt
from benchmarks.shapes import LLAMA_31_8B, MISTRAL_7B, QWEN3_06B
from benchmarks.tensor_parallel import generate, make_prompts
from vllm_blend import LLM, SamplingParams

WARM_UP = 3  # calls that are not counted: they store the chunks
KINDS = (  # of kernels, by their names; the first that fits
    ("attention", r"prefill_|decode_kernel|merge_states|mass|plan_kernel|_sums"),
    ("products", r"few_rows|gemm|nvjet|cutlass|xmma|splitK|cublas"),
    ("placing", r"place_chunk|move_kernel|sum_changes|Memcpy"),
    ("norms, RoPE and SwiGLU", r"rms_norm|rope|silu"),
    ("others", r""),
)
PARTS = ("7b", "0.6b", "sampling", "kvc")
STEPS = 32  # of requests that all decode, in a sample
CACHED: dict[str, Any] = {"enable_prefix_caching": True, "gpu_memory_utilization": 0.85}
MOST_GAPS = 5  # that an account names
DECODED = 16  # tokens of batches that decode: the profiler takes long over more
AHEAD_MS = 100  # how long the kernel that does nothing keeps the GPU
Interval = tuple[float, float]  # start and stop


@dataclass(frozen=True)
class Kernel:
    """A kernel or copy, from `start` to `stop` in ms after the call."""

    name: str
    start: float
    stop: float


@dataclass(frozen=True)
class Account:
    """What became of the time of a call, in ms."""

    wall: float
    first: float
    busy: float
    idle: float
    last: float
    num_kernels: int
    kinds: dict[str, float] = field(default_factory=dict)
    gaps: list[tuple[float, float, str]] = field(default_factory=list)  # the longest: ms, since when, the next kernel


def account(kernels: Sequence[Kernel], wall: float) -> Account:
    """Say what became of a call of `wall` ms. Raises ValueError for one without kernels."""
    if not kernels:
        raise ValueError("the call ran no kernel on the GPU, or the profiler recorded none")
    merged = union([(each.start, each.stop) for each in kernels])
    busy = sum(stop - start for start, stop in merged)
    first, last = merged[0][0], merged[-1][1]
    times = {name: 0.0 for name, _ in KINDS}
    for kernel in kernels:
        times[kind_of(kernel.name)] += kernel.stop - kernel.start
    starts = {kernel.start: kernel.name for kernel in kernels}
    gaps = [(after[0] - before[1], before[1], starts[after[0]]) for before, after in pairwise(merged)]
    longest = sorted(gaps, reverse=True)[:MOST_GAPS]
    return Account(wall, first, busy, last - first - busy, wall - last, len(kernels), times, longest)


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the same time as intervals that do not touch, ascending."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def kind_of(name: str) -> str:
    """Return the kind of a kernel."""
    return next(kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE))


def profiled(device: torch.device, run: Callable[[], float]) -> Account:
    """Return the account of what `run` does, which returns how many seconds it took. Its clock begins where a kernel of
    no work ends, for which the host waits."""
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        torch.zeros(1, device=device)
        torch.cuda.synchronize()
        seconds = run()
        torch.cuda.synchronize()
    events = sorted(
        (event for event in prof.events() or () if event.device_type.name == "CUDA"),
        key=lambda event: event.time_range.start,
    )
    zero = events[0].time_range.end
    kernels = [
        Kernel(event.name, (event.time_range.start - zero) / 1e3, (event.time_range.end - zero) / 1e3)
        for event in events[1:]
    ]
    return account(kernels, 1e3 * seconds)


def queued(run: Callable[[], float], cycles: int) -> float:
    """Return the ms from the end of a kernel that does nothing for `cycles`, queued ahead of `run`, to `run`'s end."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles)
    start.record()
    run()
    stop.record()
    stop.synchronize()
    milliseconds: float = start.elapsed_time(stop)
    return milliseconds


def cycles_of(milliseconds: float) -> int:
    """Return for how many cycles a kernel does nothing for so long: the clock is measured, for 10 million of them."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1000)
    start.record()
    torch.cuda._sleep(10_000_000)
    stop.record()
    stop.synchronize()
    return int(1e7 * milliseconds / start.elapsed_time(stop))


def check_profiler() -> None:
    """Raise SystemExit if the profiler records no kernel here."""
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    if not any(event.device_type.name == "CUDA" for event in prof.events() or ()):
        raise SystemExit(
            "torch's profiler recorded no kernel on this GPU: CUPTI could not start (its message is above); "
            "--without-profiler times the calls alone"
        )


@dataclass(frozen=True)
class Work:
    """Calls of `generate`, each with prompts of its own, and the tokens of an answer."""

    name: str
    batches: list[list[Any]]
    tokens: int


def blends(llm: LLM, calls: int) -> Iterator[Work]:
    """Return the works with stored passages."""
    rng = Random(0)
    prompt = make_prompt(llm.get_tokenizer(), 8 * CHUNK + 64, CHUNK, 0)
    scores = [rng.random() for _ in prompt["chunks"]]
    for rule, ratio in (
        ("none", 0.0),
        (WHOLE_BUDGET, 0.08),
        (WHOLE_BUDGET, 0.15),
        ("question_attention", 0.08),
        ("question_attention", 0.15),
        ("auto", 0.08),
    ):
        asked = prompt | {"blend_selector": rule, "blend_recompute_ratio": ratio}
        if rule == WHOLE_BUDGET:
            asked["relevance"] = scores
        yield Work(f"one prompt of 8 passages, {rule}, {ratio:.0%}", [[asked]] * calls, 1)
    for rule, ratio in (("none", 0.0), (WHOLE_BUDGET, 0.08), (WHOLE_BUDGET, 0.15), ("question_attention", 0.15)):
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
    most = STEPS * (WARM_UP + 2 * args.repeats + 1)
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
