"""What became of the time of a call on a GPU: its kernels, as torch's profiler (CUPTI) records them.

`gpu_timeline` says what the parts of an account mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity, profile

KINDS = (  # of kernels, by their names; the first that fits
    ("attention", r"prefill_|decode_kernel|merge_states|mass|plan_kernel|_sums"),
    ("products", r"few_rows|gemm|nvjet|cutlass|xmma|splitK|cublas"),
    ("placing", r"place_chunk|move_kernel|sum_changes|Memcpy"),
    ("norms, RoPE and SwiGLU", r"rms_norm|rope|silu"),
    ("others", r""),
)
MOST_GAPS = 5  # that an account names
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
