"""Which backend `attention_backend="auto"` takes for which job: the fastest of those that work here, by measurement."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

from vllm_blend.attention.hybrid import HybridBackend
from vllm_blend.attention.kinds import KINDS, Unusable, describe, usable
from vllm_blend.attention.measure import DECODE, DENSE, JOBS, SCATTERED, HeadLayout, Workload
from vllm_blend.attention.metadata import AttentionBackend

logger = logging.getLogger(__name__)

OURS = ("cpu", "cuda")
MARGIN = 0.95  # a backend further down the list of preference must take less than this share of the time
ALWAYS_FASTER = ("avx2", "avx512")  # instruction sets of the CPU kernels, see `choose`


@dataclass(frozen=True)
class Choice:
    """Names of backends, one per job."""

    dense: str
    scattered: str
    decode: str
    mass: str

    def make(self, layout: HeadLayout) -> AttentionBackend:
        """The backend of all jobs, or a hybrid. Jobs of the same name share one backend."""
        names = (self.dense, self.scattered, self.decode, self.mass)
        made = {name: KINDS[name].make(layout) for name in dict.fromkeys(names)}
        return HybridBackend(*(made[name] for name in names)) if len(made) > 1 else made[names[0]]


@dataclass(frozen=True)
class Timing:
    """A backend that works, and the milliseconds of a layer by job."""

    capturable_decode: bool
    milliseconds: dict[str, float]


@cache
def choose(layout: HeadLayout, decode_graphs: bool) -> Choice:
    """The fastest working backend of each job; one line of the log has the times, others what is left out and why.

    Choosing again in this process costs nothing. On a CPU with AVX2 or AVX-512, our kernels are taken without timing:
    they were faster than plain torch in each of 99 comparisons there (float32, bfloat16 and float16; 3 to 5 head
    layouts; all jobs), and no other backend runs on a CPU. Compiled for no instruction set, they sometimes lost.
    """
    if layout.device.type == "cpu" and _has_vector_kernels():
        return Choice("cpu", "cpu", "cpu", "cpu")
    reasons: dict[str, str] = {}
    with torch.inference_mode():
        timings = _measure(layout, decode_graphs, reasons)
    if layout.device.type == "cuda":
        torch.cuda.empty_cache()  # the KV cache is sized by what is free
    ours = next((name for name in OURS if name in timings), None)
    fastest = {job: fastest_of(timings, job, decode_graphs and job == DECODE) for job in JOBS}
    if ours is None:
        where = "in plain torch" if list(timings) == ["torch_native"] else "without our kernels"
        logger.warning("attention runs %s: %s", where, reasons[layout.device.type])
    choice = Choice(fastest[DENSE], fastest[SCATTERED], fastest[DECODE], ours or fastest[SCATTERED])
    if len(timings) > 1:
        logger.info("%s", _table(timings, fastest, layout))
    return choice


def fastest_of(timings: dict[str, Timing], job: str, captured: bool) -> str:
    """The fastest backend; the first of those within the margin of one another.

    With `captured`, one that CUDA graphs can hold if any can: the graph of a whole step is worth more than a kernel.
    """
    names = list(timings)
    if captured:
        names = [name for name in names if timings[name].capturable_decode] or names
    best = names[0]
    for name in names[1:]:
        if timings[name].milliseconds[job] < MARGIN * timings[best].milliseconds[job]:
            best = name
    return best


def _measure(layout: HeadLayout, decode_graphs: bool, reasons: dict[str, str]) -> dict[str, Timing]:
    """Timings of the backends that work, in order of preference; `reasons` receives why the others do not."""
    workload = Workload.make(layout)
    working: dict[str, AttentionBackend] = {}
    for name, kind in KINDS.items():
        unfit = kind.unfit(layout)
        if unfit is not None:
            reasons[name] = unfit
            continue
        try:
            working[name] = usable(name, layout, workload)
        except Unusable as error:
            reasons[name] = str(error)
            if kind.package is not None:
                level = logging.INFO if error.missing else logging.WARNING
                logger.log(level, "attention backend %s is left out: %s", name, error)
    if len(working) == 1:  # nothing to compare
        return {name: Timing(b.capturable_decode, dict.fromkeys(JOBS, 0.0)) for name, b in working.items()}
    timings = {}
    for name, backend in working.items():
        captured = decode_graphs and backend.capturable_decode
        try:
            figures = {job: workload.milliseconds(backend, job, captured and job == DECODE) for job in JOBS}
        except Exception as error:  # worked on a small step and fails on these: as in `usable`, it may raise anything
            reasons[name] = f"it fails when timed: {describe(error)}"
            logger.warning("attention backend %s is left out: %s", name, reasons[name])
        else:
            timings[name] = Timing(backend.capturable_decode, figures)
    return timings


def _table(timings: dict[str, Timing], fastest: dict[str, str], layout: HeadLayout) -> str:
    parts = []
    for job, chosen in fastest.items():
        by_time = sorted(timings, key=lambda name: timings[name].milliseconds[job])
        parts.append(
            f"{job}: {chosen} (" + ", ".join(f"{name} {timings[name].milliseconds[job]:.3f}" for name in by_time) + ")"
        )
    heads = f"{layout.num_heads}/{layout.num_kv_heads} heads of {layout.head_dim}"
    return f"attention, ms per layer, {layout.dtype}, {heads}: {'; '.join(parts)}"


def _has_vector_kernels() -> bool:
    from vllm_blend.ops.bindings import cpu_kernels, cpu_kernels_available

    return cpu_kernels_available() and cpu_kernels().isa in ALWAYS_FASTER
