"""Time every compiled CPU op against plain torch, at the shapes of the demo model: `python -m benchmarks.cpu_ops`.

Prints the best time of each and their ratio. For attention, "torch" is the plain torch backend, with the gathering of
the paged cache; the layers' caches are cycled through, as in a step, so that the keys come from memory and not from the
nearest cache.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vllm_blend import ops
from vllm_blend.attention.cpu import CPUBackend
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerStep
from vllm_blend.attention.torch_native import TorchNativeBackend
from vllm_blend.ops import bindings
from vllm_blend.ops.activation import silu_and_mul_reference
from vllm_blend.ops.cache import place_chunk_reference, reshape_and_cache_reference
from vllm_blend.ops.layernorm import fused_add_rms_norm_reference, rms_norm_reference
from vllm_blend.ops.paged_kv import PagedKV
from vllm_blend.ops.rotary import rotary_embedding_reference

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 12, 384, 6, 2, 64, 768
BLOCK_SIZE, CONTEXT = 16, 900
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Case:
    name: str
    kernel: Callable[[], object]
    torch: Callable[[], object]


def best_microseconds(run: Callable[[], object], repeat: int) -> float:
    run()
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best * 1e6


def elementwise_cases(rows: int, dtype: torch.dtype) -> list[Case]:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((rows, HIDDEN), (rows, HIDDEN), (HIDDEN,)))
    gate_up = torch.randn(rows, 2 * MLP).to(dtype)
    projection = torch.randn(2 * MLP, HIDDEN).to(dtype)
    qkv = torch.randn(rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype).view(rows, -1, HEAD_DIM)
    q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    cos, sin = torch.randn(2, rows, HEAD_DIM // 2)
    cache = torch.zeros(2, -(-rows // BLOCK_SIZE), BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)
    slots = torch.arange(rows)

    def rope_and_cache_reference() -> None:
        rotary_embedding_reference(q, cos, sin)
        reshape_and_cache_reference(rotary_embedding_reference(k, cos, sin), v, PagedKV(cache[0], cache[1]), slots)

    return [
        Case("rms_norm", lambda: ops.rms_norm(x, weight, 1e-5), lambda: rms_norm_reference(x, weight, 1e-5)),
        Case(
            "fused_add_rms_norm",
            lambda: ops.fused_add_rms_norm(x, residual, weight, 1e-5),
            lambda: fused_add_rms_norm_reference(x, residual, weight, 1e-5),
        ),
        Case("silu_and_mul", lambda: ops.silu_and_mul(gate_up), lambda: silu_and_mul_reference(gate_up)),
        Case(
            "rotary_and_cache",
            lambda: ops.rotary_and_cache(q, k, v, cos, sin, PagedKV(cache[0], cache[1]), slots),
            rope_and_cache_reference,
        ),
        Case(
            "linear 384 -> 1536",
            lambda: ops.linear(x, projection),
            lambda: torch.nn.functional.linear(x, projection),
        ),
    ]


def place_chunk_case(tokens: int, dtype: torch.dtype) -> Case:
    k, v = torch.randn(2, LAYERS, tokens, KV_HEADS, HEAD_DIM).to(dtype)
    cos, sin = torch.randn(2, tokens, HEAD_DIM // 2)
    cache = torch.zeros(2, LAYERS, -(-tokens // BLOCK_SIZE), BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)
    slots = torch.randperm(tokens)
    arguments = (k, v, cos, sin, cache[0], cache[1], slots)
    return Case(
        "place_chunk",
        lambda: ops.place_chunks([arguments[:2]], *arguments[2:]),
        lambda: place_chunk_reference(*arguments),
    )


@dataclass(frozen=True)
class Step:
    """One attention step, with the caches of all layers."""

    q: torch.Tensor
    caches: list[PagedKV]
    metadata: AttentionMetadata

    @classmethod
    def build(cls, lengths: list[int], positions: list[torch.Tensor], dtype: torch.dtype) -> Step:
        counts = [-(-n // BLOCK_SIZE) for n in lengths]
        free = iter(torch.randperm(sum(counts)).tolist())
        tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, count in zip(tables, counts, strict=True):
            row[:count] = torch.tensor(list(itertools.islice(free, count)))
        starts = torch.tensor([0, *map(len, positions)]).cumsum(0).tolist()
        metadata = AttentionMetadata(torch.cat(positions), torch.zeros(starts[-1]), tables, starts, lengths)
        shape = (sum(counts), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        caches = [PagedKV(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(LAYERS)]
        return cls(torch.randn(starts[-1], HEADS, HEAD_DIM).to(dtype), caches, metadata)

    def attend(self, backend: AttentionBackend) -> None:
        for cache in self.caches:
            backend.attend(LayerStep(self.q, cache, self.metadata, HEAD_DIM**-0.5))

    def mass(self, backend: AttentionBackend) -> None:
        rows = [self.metadata.rows(request) for request in range(self.metadata.num_requests)]
        for cache in self.caches:
            backend.attention_mass(LayerStep(self.q, cache, self.metadata, HEAD_DIM**-0.5), rows)


def attention_cases(dtype: torch.dtype) -> list[Case]:
    """Yield the cases of attention. Times are those of all layers together."""
    kernels, plain = CPUBackend(), TorchNativeBackend()
    everything = torch.arange(CONTEXT)
    suffix = everything[-20:]
    scattered = torch.cat([torch.randperm(CONTEXT - 20)[: CONTEXT * 15 // 100 - 20].sort().values, suffix])
    steps = {
        f"prefill, all of {CONTEXT}": Step.build([CONTEXT], [everything], dtype),
        f"prefill, scattered 15% of {CONTEXT}": Step.build([CONTEXT], [scattered], dtype),
        f"decode, 1 x {CONTEXT}": Step.build([CONTEXT], [everything[-1:]], dtype),
        f"decode, 16 x {CONTEXT}": Step.build([CONTEXT] * 16, [everything[-1:]] * 16, dtype),
    }
    question = Step.build([CONTEXT], [suffix], dtype)
    cases = [
        Case(f"{name}, {LAYERS} layers", partial(step.attend, kernels), partial(step.attend, plain))
        for name, step in steps.items()
    ]
    name = f"attention mass, 20 queries, {LAYERS} layers"
    return [*cases, Case(name, partial(question.mass, kernels), partial(question.mass, plain))]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeat", type=int, default=20, help="runs, of which the best counts")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, kernels {bindings.cpu_kernels().isa}, {arguments.threads} threads; microseconds")
    print(f"{'op':46} {'dtype':9} {'kernel':>9} {'torch':>9} {'ratio':>6}")
    with torch.inference_mode():
        for name in arguments.dtype:
            dtype = DTYPES[name]
            cases = [
                Case(f"{case.name}, {rows} rows", case.kernel, case.torch)
                for rows in (1, 16, 135, CONTEXT)
                for case in elementwise_cases(rows, dtype)
            ]
            for case in [*cases, place_chunk_case(CONTEXT, dtype), *attention_cases(dtype)]:
                ours, theirs = (best_microseconds(run, arguments.repeat) for run in (case.kernel, case.torch))
                print(f"{case.name:46} {name:9} {ours:9.1f} {theirs:9.1f} {theirs / ours:6.2f}", flush=True)


if __name__ == "__main__":
    main()
