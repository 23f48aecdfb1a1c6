"""Say where the time of a call goes on a GPU: what its kernels take, by kind, and when the GPU waits for the host.

    bash scripts/build_cuda.sh && python -m benchmarks.gpu_timeline --output gpu_timeline.json

One engine with random weights in the shape of a 7B model, bf16, answers prompts of 8 passages of 512 tokens whose KV is
stored (synthetic text), by several rules, alone and many at once; and it decodes batches. Each call of `LLM.generate`
is timed --repeats times as it is, and as often under torch's profiler, which records kernels and copies (CUPTI) and
slows the host: so the time is that of the calls without it, and the shares are those of the calls with it.

- `first`: from the call to the first kernel; `idle`: later times without any kernel; `last`: from the last kernel to
  the return. A copy is a kernel, too.
- Kernels that run at once count for each kind, so kinds may add up to more than `busy`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine_gpu import CHUNK, ids, load
from benchmarks.first_token import WHOLE_BUDGET, about, make_prompt
from benchmarks.shapes import MISTRAL_7B
from benchmarks.tensor_parallel import generate, make_prompts
from vllm_blend import LLM

WARM_UP = 3  # calls that are not counted: they store the chunks
KINDS = (  # of kernels, by their names; the first that fits
    ("attention", r"prefill_|decode_kernel|merge_states|mass|plan_kernel"),
    ("products", r"gemm|nvjet|cutlass|xmma|splitK|cublas"),
    ("placing", r"place_chunk|move_kernel|sum_changes|Memcpy"),
    ("norms, RoPE and SwiGLU", r"rms_norm|rope|silu"),
    ("others", r""),
)
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
    return Account(wall, first, busy, last - first - busy, wall - last, len(kernels), times)


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


def profiled(llm: LLM, prompts: list[Any], tokens: int) -> Account:
    """Return the account of one call. Its clock begins where a kernel of no work ends, for which the host waits."""
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        torch.zeros(1, device=llm.llm_engine.device)
        torch.cuda.synchronize()
        seconds = generate(llm, prompts, tokens)
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


def works(llm: LLM, calls: int) -> Iterator[tuple[str, list[list[Any]], int]]:
    """Return the name of every work, its prompts for each call, and the tokens of an answer."""
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
        yield f"one prompt of 8 passages, {rule}, {ratio:.0%}", [[asked]] * calls, 1
    for rule, ratio in (("none", 0.0), (WHOLE_BUDGET, 0.08), (WHOLE_BUDGET, 0.15), ("question_attention", 0.15)):
        batches = make_prompts(llm.get_tokenizer(), calls, 64, rule, ratio)
        yield f"64 such prompts at once, {rule}, {ratio:.0%}, 32 tokens out", batches, 32
    for batch, context in ((1, 4096), (32, 4096)):
        same = [{"prompt_token_ids": ids(rng, context, 32000)} for _ in range(batch)]
        yield f"64 tokens of {batch} at {context}, prompts cached", [same] * calls, 64


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="calls of each work, with the profiler and without")
    parser.add_argument("--output", type=Path, help="JSON file for the samples")
    args = parser.parse_args(argv)
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats} must be at least 1")
    options: dict[str, Any] = {"blend_chunk_cache_gib": 4, "max_num_seqs": 64, "gpu_memory_utilization": 0.85}
    llm = load(MISTRAL_7B, enable_blending=True, enable_prefix_caching=True, max_model_len=8192, **options)
    samples: dict[str, dict[str, Any]] = {}
    print("\n".join(HEAD))
    for name, batches, tokens in works(llm, WARM_UP + 2 * args.repeats):
        calls = iter(batches)
        for _ in range(WARM_UP):
            generate(llm, next(calls), tokens)
        wall = [1e3 * generate(llm, next(calls), tokens) for _ in range(args.repeats)]
        accounts = [profiled(llm, next(calls), tokens) for _ in range(args.repeats)]
        samples[name] = {"wall_ms": wall, "profiled": [asdict(each) for each in accounts]}
        print(row(name, wall, accounts), flush=True)
    if args.output:
        args.output.write_text(json.dumps({"about": about(llm), "samples": samples}) + "\n", encoding="utf-8")
    llm.shutdown()


_COLUMNS = ("wall", "profiled", "first", "busy", "idle", "last", "kernels", *(kind for kind, _ in KINDS))
HEAD = [f"| work | {' | '.join(_COLUMNS)} |", "|---|" + "---:|" * len(_COLUMNS)]


def row(name: str, wall: Sequence[float], accounts: Sequence[Account]) -> str:
    """Return a line of the table: medians in ms, and the number of kernels."""
    columns = [
        wall,
        *([getattr(each, part) for each in accounts] for part in ("wall", "first", "busy", "idle", "last")),
    ]
    kinds = [[each.kinds[kind] for each in accounts] for kind, _ in KINDS]
    cells = [f"{statistics.median(values):.2f}" for values in (*columns, *kinds)]
    cells.insert(len(columns), f"{statistics.median([each.num_kernels for each in accounts]):.0f}")
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
