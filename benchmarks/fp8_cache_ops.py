"""Time attention over pages of e4m3 against pages of the queries' dtype, in turns, on a CPU.

    python -m benchmarks.fp8_cache_ops [--dtype bfloat16] [--rounds 20] [--output FILE]

The shape is a 7B model's layer: 32 query heads, 8 KV heads of 128. `decode` is 16 requests with one query over 2,048
keys each, `prefill` one request of 1,024 queries. Each round times both caches, one after the other; what counts is the
median of the rounds' ratios, as the machine may be doing other work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from vllm_blend import ops
from vllm_blend.ops.bindings import cpu_kernels
from vllm_blend.ops.e4m3 import E4M3
from vllm_blend.ops.paged_kv import PagedKV

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
CASES = {"decode": (16, 1, 2048), "prefill": (1, 1024, 1024)}  # requests, queries and keys of each


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, help="keep the samples in this file")
    args = parser.parse_args(argv)
    dtype, threads = getattr(torch, args.dtype), torch.get_num_threads()
    print(
        f"{cpu_kernels().isa}, {threads} threads, {args.dtype} queries; seconds of e4m3 pages / seconds of {args.dtype}"
    )
    samples = {}
    for case in CASES:
        rounds = samples[case] = time_case(case, dtype, args.rounds)
        ratios = sorted(fp8 / full for full, fp8 in rounds)
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        print(f"{case}: {statistics.median(ratios):.2f} (quartiles {low:.2f} to {high:.2f})")
    if args.output:
        about = {"isa": cpu_kernels().isa, "threads": threads, "dtype": args.dtype}
        args.output.write_text(json.dumps({**about, "seconds [full, e4m3]": samples}) + "\n")


@torch.inference_mode()
def time_case(case: str, dtype: torch.dtype, rounds: int) -> list[tuple[float, float]]:
    requests, queries, keys = CASES[case]
    blocks = keys // BLOCK
    random = torch.Generator().manual_seed(0)
    tables = torch.randperm(requests * blocks, generator=random).view(requests, blocks).int()
    shape = (requests * blocks, BLOCK, KV_HEADS, HEAD_DIM)
    key, value = (torch.randn(shape, generator=random) for _ in range(2))
    caches = [PagedKV(key.to(kind), value.to(kind)) for kind in (dtype, E4M3)]
    q = torch.randn(requests * queries, HEADS, HEAD_DIM, generator=random).to(dtype)
    positions = torch.arange(keys - queries, keys).repeat(requests)
    where = (positions, tables, torch.arange(requests + 1) * queries, torch.full((requests,), keys), HEAD_DIM**-0.5)
    found = []
    for _ in range(rounds + 1):
        seconds = []
        for cache in caches:
            start = time.perf_counter()
            ops.paged_attention(q, cache, *where)
            seconds.append(time.perf_counter() - start)
        found.append((seconds[0], seconds[1]))
    return found[1:]


if __name__ == "__main__":
    main()
