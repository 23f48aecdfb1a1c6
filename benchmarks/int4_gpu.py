"""Time products with 4-bit weights on this GPU by both ways, beside the product with the same weights in bfloat16.

    bash scripts/build_cuda.sh && python -m benchmarks.int4_gpu --output int4.json

"PyTorch" multiplies by aten::_weight_int4pack_mm, "unpacked" writes the matrix out in bf16 and has cuBLAS multiply,
"bf16" has that matrix in memory. `vllm_blend.ops.int4_tiles.KERNEL_ROWS` is to be the most rows for which the first is
faster than the second. A time is the median over rounds, which take the three in turn; in each it is the median over
replays of a CUDA graph of products with several matrices that together exceed the L2 cache, as the layers of a model
do. "unpack" is the kernel alone, with the bytes that it reads and writes a second; "differs" is the largest relative
error of the two ways against float64, with 16 rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.kernels_gpu import DEVICE, random, relative, time_ms
from vllm_blend import ops
from vllm_blend.ops import Int4Tiles

GROUP = 128
FEW = (1, 8, 16, 32, 64, 128)  # rows for PyTorch's product, which takes a multiple of the time for more
ROWS = (*FEW, 256, 512, 1024, 2048, 4096, 8192)
SIZES = ((4096, 14336), (14336, 4096), (4096, 6144))  # in, out
IN_TURN_BYTES = 2.5e8  # of the matrices that a graph multiplies by, in 4 bits
NAMES = ("PyTorch", "unpacked", "bf16")
Samples = dict[str, list[float]]


def matrices(size: int, features: int) -> list[Int4Tiles]:
    """Return as many random matrices as no L2 cache holds."""
    numbers = torch.randint(16, (features, size), dtype=torch.uint8, device=DEVICE)
    zeros = torch.randint(16, (features, size // GROUP), dtype=torch.uint8, device=DEVICE)
    count = max(2, int(IN_TURN_BYTES // (size * features // 2)))
    return [ops.pack_tiles(numbers, torch.rand(zeros.shape, device=DEVICE) / 100, zeros) for _ in range(count)]


def by_torch(x: torch.Tensor, weight: Int4Tiles) -> torch.Tensor:
    out: torch.Tensor = torch._weight_int4pack_mm(x, weight.tiles, weight.group_size, weight.scales_and_zeros)
    return out


def unpacked(x: torch.Tensor, weight: Int4Tiles) -> torch.Tensor:
    return F.linear(x, ops.unpack_tiles(weight))


def unpack(weights: list[Int4Tiles], i: int) -> torch.Tensor:
    return ops.unpack_tiles(weights[i % len(weights)])


def measure(weights: list[Int4Tiles], rows: int, rounds: int) -> Samples:
    """Return the milliseconds of each way, by name, one for each round."""
    x, count = random(rows, weights[0].shape[1]), len(weights)
    plain = [ops.unpack_tiles(weight) for weight in weights[:4]]
    calls: dict[str, Callable[[int], object]] = {
        "PyTorch": lambda i: by_torch(x, weights[i % count]),
        "unpacked": lambda i: unpacked(x, weights[i % count]),
        "bf16": lambda i: F.linear(x, plain[i % len(plain)]),
    }
    if rows not in FEW:
        del calls["PyTorch"]
    samples: Samples = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(time_ms(call, count))
    return samples


def error(weight: Int4Tiles) -> float:
    x = random(16, weight.shape[1])
    expected = F.linear(x.double(), ops.unpack_tiles(weight).double())
    return max(relative(multiply(x, weight), expected) for multiply in (by_torch, unpacked))


def table(measured: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table of what `main` has measured."""
    lines = [f"| in | out | rows | {' | '.join(f'{name} us' for name in NAMES)} |", "|---|---|---|---|---|---|"]
    for one in measured:
        samples: Samples = one["samples"]
        times = [f"{1e3 * statistics.median(samples[name]):.1f}" if name in samples else "" for name in NAMES]
        lines.append(f"| {one['size']} | {one['features']} | {one['rows']} | {' | '.join(times)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a JSON file for every round's times")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    print(machine)
    measured: list[dict[str, Any]] = []
    for size, features in SIZES:
        weights = matrices(size, features)
        alone = time_ms(partial(unpack, weights), len(weights))
        moved = weights[0].nbytes + 2 * size * features
        print(
            f"{size} -> {features}: unpack {1e3 * alone:.1f} us, {moved / alone / 1e6:.0f} GB/s; differs "
            f"{error(weights[0]):.1e}; {len(weights)} matrices of {weights[0].nbytes / 2**20:.1f} MiB in turn"
        )
        for rows in ROWS:
            samples = measure(weights, rows, args.rounds)
            measured.append({"size": size, "features": features, "rows": rows, "samples": samples})
            print(table(measured)[-1], flush=True)
        del weights
        torch.cuda.empty_cache()
    print("\n".join(table(measured)))
    if args.output is not None:
        args.output.write_text(json.dumps({"machine": machine, "group": GROUP, "measured": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
