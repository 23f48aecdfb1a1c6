"""Time the mean shift on this GPU, a layer at a time: the kernel, plain torch, and the memory that it moves.

    python -m benchmarks.mean_shift_gpu

A prompt of chunks of 512 tokens, of each of which a share is computed again; 8 KV heads of 128, bf16. "GPU" is the
median over replays of a CUDA graph of 8 layers that together exceed the L2 cache; "with host" is that of 32 layers as a
forward pass queues them, whichever of host and GPU takes longer. "floor" is the time of a large copy in the same run
that reads and writes as many bytes: stored K and V once, the tokens that move, and the rows that are computed. "plan"
is done once a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.kernels_gpu import BLOCK, DEVICE, DIM, DTYPE, KV_HEADS, random, relative, time_ms
from vllm_blend import ops
from vllm_blend.ops.mean_shift import MeanShiftPlan, mean_shift_reference, plan_mean_shift_reference
from vllm_blend.ops.paged_kv import PagedKV

LAYERS, CHUNK = 32, 512
Shift = Callable[[MeanShiftPlan, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, PagedKV], None]


class Step:
    """A step of one prompt, the question of 32 tokens included, and its layers' caches."""

    def __init__(self, length: int, share: float, layers: int) -> None:
        count = length // CHUNK
        self.length, self.layers = count * CHUNK, layers
        stored = [random(2, layers, CHUNK, KV_HEADS, DIM) for _ in range(count)]
        self.segments = [ops.ShiftedSegment(0, i * CHUNK, k, v, 1.0) for i, (k, v) in enumerate(stored)]
        chosen = torch.randperm(self.length, device=DEVICE)[: int(share * self.length)].sort().values
        self.positions = torch.cat([chosen, torch.arange(self.length, self.length + 32, device=DEVICE)])
        self.chosen = len(chosen)
        blocks = (self.length + 32) // BLOCK
        self.table = torch.randperm(blocks, device=DEVICE).to(torch.int32)[None]
        self.caches = [PagedKV(*(random(blocks, BLOCK, KV_HEADS, DIM) for _ in range(2))) for _ in range(layers)]
        rows = len(self.positions)
        packed = [random(rows, 6 * KV_HEADS, DIM) for _ in range(layers)]
        self.kv = [(x[:, 4 * KV_HEADS : 5 * KV_HEADS], x[:, 5 * KV_HEADS :]) for x in packed]
        angles = torch.rand(self.length + 32, DIM // 2, device=DEVICE) * 100
        self.cos, self.sin = angles.cos(), angles.sin()

    def plan(self, make: Callable[..., MeanShiftPlan]) -> MeanShiftPlan:
        sources = ops.ShiftSources(self.segments, self.caches[0])
        return make(sources, self.positions, [0, len(self.positions)], self.table, self.caches[0])

    def layer(self, shift: Shift, plan: MeanShiftPlan, i: int) -> None:
        layer = i % self.layers
        shift(plan, layer, *self.kv[layer], self.cos, self.sin, self.caches[layer])

    def forward(self, shift: Shift, plan: MeanShiftPlan) -> None:
        for i in range(LAYERS):
            self.layer(shift, plan, i)

    @property
    def moved_bytes(self) -> int:
        """Return what is read and written: stored K and V once, the tokens that move again, and the computed rows."""
        return 2 * (self.length + (self.length - self.chosen) + self.chosen) * KV_HEADS * DIM * DTYPE.itemsize


def queued_ms(run: Callable[[], object], repeats: int = 9) -> float:
    """Return the median milliseconds from the first call of the host to the end of the GPU's work."""
    times = []
    for _ in range(repeats + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def measure(length: int, share: float, copy_rate: float) -> None:
    """Print a row for the kernel and one for plain torch. `copy_rate`: bytes read and written in a millisecond."""
    step = Step(length, share, 8)
    floor = step.moved_bytes / copy_rate
    results = []
    for name, shift, make in (
        ("kernel", ops.mean_shift, ops.plan_mean_shift),
        ("plain torch", mean_shift_reference, plan_mean_shift_reference),
    ):
        plan = step.plan(make)
        step.layer(shift, plan, 0)
        results.append(step.caches[0].key.clone())
        gpu = time_ms(partial(step.layer, shift, plan), step.layers)
        host = queued_ms(partial(step.forward, shift, plan)) / LAYERS
        once = queued_ms(partial(step.plan, make))
        error = f"{relative(results[0], results[-1]):.0e}" if len(results) > 1 else ""
        cells = (f"{1e3 * gpu:.1f}", f"{1e3 * host:.1f}", f"{1e3 * floor:.1f}", f"{1e3 * once:.0f}", error)
        print(f"| {step.length} | {share:.0%} | {name} | " + " | ".join(cells) + " |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 32000], help="tokens of the chunks")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.08, 0.15])
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    source, target = random(1 << 28), random(1 << 28)
    copy_rate = 2 * source.nbytes / time_ms(lambda i: target.copy_(source), 4)
    print(f"a copy of 512 MiB: {copy_rate / 1e6:.0f} GB/s read and written")
    print("| tokens | computed | | GPU us | with host us | floor us | plan us | differs |")
    print("|---|---|---|---|---|---|---|---|")
    for length in args.lengths:
        for share in args.shares:
            measure(length, share, copy_rate)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
