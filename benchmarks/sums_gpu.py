"""Measure a sum over two GPUs by NCCL and through memory that both see, in turns, by size.

    bash scripts/build_cuda.sh && python -m benchmarks.sums_gpu --output sums.json

A sample is the time of one of 64 sums in a CUDA graph, whose replays are timed by events; sums are bf16, rows of 4,096.
Prints the medians in microseconds and the median of the paired ratios with a bootstrap interval of 95%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks.first_token import compare
from vllm_blend.distributed.ranks import Ranks, connect, store_in_folder
from vllm_blend.ops.graph_capture import CUDAGraphs, drop_graphs

ROWS = (1, 4, 16, 32, 64, 128, 256, 512)
HIDDEN, SUMS, REPLAYS = 4096, 64, 10
NCCL, OURS = "NCCL", "ours"
_mp: Any = mp  # as Any: torch's annotations leave `spawn` out


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="JSON file for the samples")
    args = parser.parse_args(argv)
    if torch.cuda.device_count() < 2:
        parser.error(f"needs 2 GPUs, and there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        _mp.spawn(measure, (folder, args.repeats), nprocs=2)
        samples = json.loads(Path(folder, "samples").read_text())
    print("\n".join(table(samples)))
    if args.output:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        args.output.write_text(json.dumps({"about": about, "samples": samples}) + "\n")


def table(samples: dict[str, dict[str, list[float]]]) -> list[str]:
    """Return the Markdown table of medians and paired ratios."""
    lines = ["| rows of 4096 | KiB | NCCL, us | ours, us | ours / NCCL |", "|---:|---:|---:|---:|---:|"]
    for rows, times in samples.items():
        medians = " | ".join(f"{1e6 * statistics.median(times[name]):.1f}" for name in (NCCL, OURS))
        size = int(rows) * HIDDEN * 2 // 1024
        lines.append(f"| {rows} | {size} | {medians} | {compare(times[OURS], times[NCCL], 0)} |")
    return lines


def measure(rank: int, folder: str, repeats: int) -> None:
    """Run one of the two ranks; rank 0 writes the samples."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    sides = {NCCL: connect(rank, 2, store_in_folder(folder, 2), device, [])}
    Path(folder, "ours").mkdir(exist_ok=True)
    sides[OURS] = connect(rank, 2, store_in_folder(f"{folder}/ours", 2), device, [])
    sides[OURS].share_memory(device)
    if not sides[OURS].shares_memory:
        raise RuntimeError("the GPUs do not reach one another's memory: there is nothing to compare")
    capture = CUDAGraphs(device)
    samples: dict[str, dict[str, list[float]]] = {}
    for rows in ROWS:
        given = torch.randn(rows, HIDDEN, device=device).to(torch.bfloat16)
        replays = {name: capture(partial(_sums, ranks, given))[0] for name, ranks in sides.items()}
        times = samples[str(rows)] = {NCCL: [], OURS: []}
        for turn in range(2 + repeats):
            for name, replay in replays.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(REPLAYS):
                    replay()
                end.record()
                torch.cuda.synchronize()
                if turn >= 2:
                    times[name].append(begin.elapsed_time(end) / 1e3 / REPLAYS / SUMS)
    if rank == 0:
        Path(folder, "samples").write_text(json.dumps(samples))
    drop_graphs(capture.pool)
    for ranks in sides.values():
        ranks.leave()


def _sums(ranks: Ranks, given: torch.Tensor) -> torch.Tensor:
    total = given * 0
    for _ in range(SUMS):
        total = ranks.sum(total)
    return total


if __name__ == "__main__":
    main()
