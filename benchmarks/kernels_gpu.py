"""Check and time every CUDA kernel on this GPU in one call; builds nothing.

    python -m benchmarks.kernels_gpu [--only prefill,decode,few,memory,select]

A time is the median over replays of a CUDA graph of several calls whose rotating inputs together exceed the L2 cache,
as the layers of a model do. Beside it: its rate, and torch or cuDNN at the same work in the same run. The shape is 32
query heads and 8 KV heads of 128, bf16. Prefills are timed in a row, which lowers the clock, and alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm_blend import ops
from vllm_blend.ops import cuda_attention
from vllm_blend.ops.e4m3 import E4M3, gathered, narrowed, widened
from vllm_blend.ops.paged_kv import PagedKV

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
SCALE = DIM**-0.5
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda")
Call = Callable[[int], object]


def time_ms(call: Call, inner: int = 8, repeats: int = 15) -> float:
    """Return the median milliseconds of call(i), i = 0.. over rotating inputs, inside a replayed CUDA graph."""
    for i in range(2):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(inner):
            call(i)
    times: list[float] = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / inner)
    return statistics.median(times[2:])


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def paged(lengths: list[int], sets: int = 1, cache_dtype: torch.dtype = DTYPE) -> tuple[list[PagedKV], torch.Tensor]:
    """Return `sets` caches of random K and V for requests of these lengths, and their shuffled block tables."""
    blocks = [-(-n // BLOCK) for n in lengths]
    pages = torch.randperm(sum(blocks), device=DEVICE).to(torch.int32).split(blocks)
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32, device=DEVICE)
    for r, row in enumerate(pages):
        table[r, : len(row)] = row
    shape = (sum(blocks), BLOCK, KV_HEADS, DIM)
    return [PagedKV(*(narrowed(random(*shape), cache_dtype) for _ in "kv")) for _ in range(sets)], table


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    error: float = ((actual.double() - expected.double()).norm() / expected.double().norm()).item()
    return error


def sampled_error(
    out: torch.Tensor, q: torch.Tensor, cache: PagedKV, table: torch.Tensor, positions: torch.Tensor
) -> float:
    """Return the worst relative error of a sample of one request's rows against float64."""
    k, v = (widened(gathered(c, table.long()), torch.float64).flatten(0, 1) for c in (cache.key, cache.value))
    worst = 0.0
    for row in [*range(0, len(q), max(1, len(q) // 24)), len(q) - 1]:
        n = int(positions[row]) + 1
        scores = torch.einsum("hgd,khd->hgk", q[row].double().view(KV_HEADS, -1, DIM), k[:n]) * SCALE
        expected = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v[:n]).reshape(-1, DIM)
        worst = max(worst, relative(out[row], expected))
    return worst


def prefill_case(length: int, ratio: float, cache_dtype: torch.dtype = DTYPE) -> None:
    caches, table = paged([length], 1 + int(2e8 // (length * KV_HEADS * DIM * 4)), cache_dtype)
    count, n = int(length * ratio), len(caches)
    positions = torch.randperm(length, device=DEVICE)[:count].sort().values
    start = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
    qs = [random(count, HEADS, DIM) for _ in caches]
    out, lse = torch.empty_like(qs[0]), torch.empty(count, HEADS, device=DEVICE)
    flop = 4.0 * HEADS * DIM * float((positions + 1).sum())

    inner = max(n, min(32, int(4e12 // flop)))  # about 8 ms of work a replay

    def measure(variant: str) -> None:
        plan = cuda_attention.plan_prefill(positions, start, table, caches[0], HEADS, None, variant)
        cuda_attention.attention(qs[0], caches[0], plan, SCALE, out.fill_(float("nan")), lse)
        error = sampled_error(out, qs[0], caches[0], table[0], positions)
        ms = time_ms(lambda i: cuda_attention.attention(qs[i % n], caches[i % n], plan, SCALE, out), inner)
        burst = time_ms(lambda i: cuda_attention.attention(qs[i % n], caches[i % n], plan, SCALE, out), 1, 9)
        plan_ms = time_ms(
            lambda i: cuda_attention.plan_prefill(positions, start, table, caches[0], HEADS, None, variant)
        )
        name = f"{variant:6} {100 * ratio:3.0f}% of {length:6}"
        speed = f"{ms:8.4f} ms {flop / ms / 1e9:6.0f} TFLOP/s (alone {burst:.4f} ms)"
        print(f"{name}: {speed}  error {error:.1e}  plan {1000 * plan_ms:.1f} us")

    for variant in ("mma", "wgmma"):
        measure(variant)
    if ratio == 1.0 and cache_dtype is DTYPE:
        k, v = (
            c[table[0].long()].flatten(0, 1)[:length].transpose(0, 1)[None].contiguous()
            for c in (caches[0].key, caches[0].value)
        )
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        q = qs[0].transpose(0, 1)[None].contiguous()
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            ms = time_ms(lambda i: F.scaled_dot_product_attention(q, k, v, is_causal=True), 4)
        print(f"cuDNN causal, not paged {length:6}: {ms:8.4f} ms {flop / ms / 1e9:6.0f} TFLOP/s")


def bench_prefill() -> None:
    print("\nscattered prefill attention, one layer")
    for length, ratio in [
        (4096, 0.15), (4096, 0.08), (8192, 0.15), (32000, 0.15), (32000, 0.08), (4096, 1.0), (32000, 1.0)
    ]:  # fmt: skip
        prefill_case(length, ratio)
    print(f"pages of {E4M3}")
    for length, ratio in [(4096, 0.15), (32000, 0.08), (4096, 1.0), (32000, 1.0)]:
        prefill_case(length, ratio, E4M3)


def reading_ms(moved: int) -> float:
    """Return the time to read `moved` bytes: the limit for any kernel that reads K and V once."""
    sets = max(1, int(4e8 // moved))
    pool = [torch.randint(-9, 9, (moved // 4,), dtype=torch.int32, device=DEVICE) for _ in range(sets)]
    return time_ms(lambda i: pool[i % sets].amax(), max(4, sets))


def decode_case(
    lengths: list[int], heads: int = HEADS, queries: int = 1, name: str = "", cache_dtype: torch.dtype = DTYPE
) -> None:
    batch, read = len(lengths), 2 * sum(lengths) * KV_HEADS * DIM * cache_dtype.itemsize
    sets = max(1, min(16, int(4e8 // read) + 1))
    caches, table = paged(lengths, sets, cache_dtype)
    q = random(batch * queries, heads, DIM)
    positions = torch.tensor([n - queries + i for n in lengths for i in range(queries)], device=DEVICE)
    starts = torch.arange(0, batch * queries + 1, queries, dtype=torch.int32, device=DEVICE)
    out = torch.empty_like(q)

    def plan() -> cuda_attention.AttentionPlan:
        if queries > cuda_attention.decode_max_queries(heads, KV_HEADS, DIM):
            return cuda_attention.plan_prefill(positions, starts, table, caches[0], heads)
        return cuda_attention.plan_decode(positions, table, caches[0], heads, None, starts, queries)

    planned = plan()

    def run(i: int) -> None:
        cuda_attention.attention(q, caches[i % sets], planned, SCALE, out)

    run(0)
    error = sampled_error(out[:queries], q[:queries], caches[0], table[0], positions)
    ms, plan_ms = time_ms(run, max(4, sets)), time_ms(lambda i: plan())
    what = name or f"batch {batch:3} @ {lengths[0]:5}, {queries} queries"
    floor = reading_ms(read)
    ours, best = (f"{1000 * t:6.1f} us {read / t / 1e6:5.0f} GB/s" for t in (ms, floor))
    print(f"{what:28}: {ours}, reading {best}, plan {1000 * plan_ms:.1f} us, error {error:.1e}")


def bench_decode() -> None:
    print("\npaged decode attention, one layer, GB/s of K and V read; beside it torch.amax of as many bytes")
    generator = torch.Generator().manual_seed(0)
    mix = torch.randint(100, 1600, (256,), generator=generator).tolist()
    for cache_dtype in (DTYPE, E4M3):
        print(f"pages of {cache_dtype}")
        for batch, length in [(1, 512), (1, 4096), (8, 4096), (32, 4096), (128, 2048), (1, 32000)]:
            decode_case([length] * batch, cache_dtype=cache_dtype)
        decode_case(mix, 16, name="256 of 100 - 1600, 16/8 heads", cache_dtype=cache_dtype)


def bench_few() -> None:
    print("\nfew queries over long keys, one layer: up to 8 by the decode kernel, more by the prefill kernel")
    for length in (4096, 32000):
        for queries in (2, 4, 8, 16, 32):
            decode_case([length], queries=queries)
    decode_case([2048] * 32, queries=5)


def report(name: str, moved: float, ours: float, other: float, error: float) -> None:
    rate = moved / ours / 1e6
    print(f"{name:30} {1000 * ours:8.1f} us {rate:6.0f} GB/s   torch {1000 * other:8.1f} us   differs {error:.1e}")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


def place_case(tokens: int, layers: int) -> None:
    k, v = random(layers, tokens, KV_HEADS, DIM), random(layers, tokens, KV_HEADS, DIM)
    blocks = tokens // BLOCK + 20
    keys, values = (torch.empty(layers, blocks, BLOCK, KV_HEADS, DIM, device=DEVICE, dtype=DTYPE) for _ in range(2))
    slots = (torch.randperm(blocks, device=DEVICE)[: tokens // BLOCK, None] * BLOCK).add(
        torch.arange(BLOCK, device=DEVICE)
    )
    slots = slots.flatten()
    angles = torch.rand(tokens, DIM // 2, device=DEVICE) * 100
    cos, sin = angles.cos(), angles.sin()
    flat = [c.view(layers, -1, KV_HEADS, DIM) for c in (keys, values)]

    def plain(i: int) -> None:
        flat[0].index_copy_(1, slots, rotate(k, cos, sin))
        flat[1].index_copy_(1, slots, v)

    ours = time_ms(lambda i: ops.place_chunks([(k, v)], cos, sin, keys, values, slots), 2)
    placed = flat[0][:, slots]
    other = time_ms(plain, 2, 5)
    report(f"place_chunk {layers} x {tokens}", 8 * k.numel(), ours, other, relative(placed, flat[0][:, slots]))


def rope_case(tokens: int) -> None:
    qkvs = [random(tokens, (HEADS + 2 * KV_HEADS) * DIM) for _ in range(16)]
    keys, values = random(300, BLOCK, KV_HEADS, DIM), random(300, BLOCK, KV_HEADS, DIM)
    slots = torch.randperm(300 * BLOCK, device=DEVICE)[:tokens]
    angles = torch.rand(tokens, DIM // 2, device=DEVICE) * 100
    cos, sin = angles.cos(), angles.sin()

    def plain(i: int) -> None:
        x = qkvs[i % 16].view(tokens, -1, DIM)
        x[:, : HEADS + KV_HEADS] = rotate(x[:, : HEADS + KV_HEADS], cos, sin)
        keys.view(-1, KV_HEADS, DIM).index_copy_(0, slots, x[:, HEADS : HEADS + KV_HEADS])
        values.view(-1, KV_HEADS, DIM).index_copy_(0, slots, x[:, HEADS + KV_HEADS :])

    expected = rotate(qkvs[0].view(tokens, -1, DIM)[:, :HEADS], cos, sin)
    kv = PagedKV(keys, values)
    packed = [x.view(tokens, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1) for x in qkvs]

    def rope(i: int) -> None:
        q, k, v = packed[i % 16]
        ops.rotary_and_cache(q, k, v, cos, sin, kv, slots)

    rope(0)
    error = relative(qkvs[0].view(tokens, -1, DIM)[:, :HEADS], expected)
    ours = time_ms(rope, 16)
    report(f"rope_and_cache {tokens}", 4 * qkvs[0].numel(), ours, time_ms(plain, 4), error)


def norm_case(tokens: int, hidden: int) -> None:
    xs, rs = ([random(tokens, hidden) for _ in range(16)] for _ in range(2))
    w = torch.rand(hidden, device=DEVICE, dtype=DTYPE)

    def plain(i: int) -> torch.Tensor:
        total = (xs[i % 16] + rs[i % 16]).float()
        return F.rms_norm(total, (hidden,), None, 1e-5).to(DTYPE) * w

    error = relative(ops.fused_add_rms_norm(xs[0], rs[0].clone(), w, 1e-5)[0], plain(0))
    ours = time_ms(lambda i: ops.fused_add_rms_norm(xs[i % 16], rs[i % 16], w, 1e-5), 16)
    report(f"add + rms_norm {tokens} x {hidden}", 8 * xs[0].numel(), ours, time_ms(plain, 4), error)


def silu_case(tokens: int, n: int) -> None:
    gates = [random(tokens, 2 * n) for _ in range(4)]

    def plain(i: int) -> torch.Tensor:
        gate, up = gates[i % 4].chunk(2, -1)
        return F.silu(gate) * up

    error = relative(ops.silu_and_mul(gates[0]), plain(0))
    ours = time_ms(lambda i: ops.silu_and_mul(gates[i % 4]), 8)
    report(f"silu_and_mul {tokens} x {n}", 6 * tokens * n, ours, time_ms(plain, 4), error)


def bench_memory() -> None:
    print("\nmemory-bound kernels, GB/s read and written")
    a, b = random(1 << 29), random(1 << 29)
    ms = time_ms(lambda i: torch.neg(b, out=a), 4)
    print(f"ceiling: torch.neg of 1 GiB, {2 * 2**30 / ms / 1e6:.0f} GB/s")
    place_case(4096, 32)
    for tokens in (614, 4096):
        rope_case(tokens)
        norm_case(tokens, 4096)
        silu_case(tokens, 14336)


def deviation_case(length: int) -> None:
    caches, table = paged([length], 4)
    slots = (table[0].long()[:, None] * BLOCK + torch.arange(BLOCK, device=DEVICE)).flatten()[:length].contiguous()
    fresh = [random(length, KV_HEADS, DIM) for _ in range(4)]

    def plain(i: int) -> torch.Tensor:
        old = caches[i % 4].value.view(-1, KV_HEADS, DIM)[slots]
        return (fresh[i % 4].float() - old.float()).pow(2).sum((1, 2))

    error = relative(ops.kv_deviation(fresh[0], caches[0].value, slots), plain(0))
    ours = time_ms(lambda i: ops.kv_deviation(fresh[i % 4], caches[i % 4].value, slots))
    report(f"kv_deviation {length}", 4 * fresh[0].numel(), ours, time_ms(plain, 4), error)


def mass_case(length: int, rows: int) -> None:
    caches, table = paged([length], 4)
    q = random(rows, HEADS, DIM)
    positions = torch.arange(length - rows, length, device=DEVICE)
    start = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    plan = cuda_attention.plan_prefill(positions, start, table, caches[0], HEADS)
    lse, mass = torch.empty(rows, HEADS, device=DEVICE), torch.zeros(KV_HEADS, length, device=DEVICE)

    def plain(i: int) -> torch.Tensor:
        k = caches[i % 4].key[table[0].long()].flatten(0, 1)[:length].repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * SCALE
        seen = torch.arange(length, device=DEVICE) <= positions[:, None]
        mass: torch.Tensor = scores.masked_fill(~seen, float("-inf")).softmax(-1).sum(1).mean(0)
        return mass

    cuda_attention.attention(q, caches[0], plan, SCALE, lse=lse)
    cuda_attention.attention_mass(q, lse, positions, caches[0], table[0], mass, SCALE)
    error = relative(mass.sum(0), plain(0))
    attend = time_ms(lambda i: cuda_attention.attention(q, caches[i % 4], plan, SCALE, lse=lse))
    ours = time_ms(lambda i: cuda_attention.attention_mass(q, lse, positions, caches[i % 4], table[0], mass, SCALE))
    report(f"attention_mass {rows} x {length}", 2 * caches[0].key.numel(), ours, time_ms(plain, 2), error)
    print(f"    and the attention that gives its LSE: {1000 * attend:.1f} us")


def bench_select() -> None:
    print("\nselection")
    for length in (4096, 32000):
        deviation_case(length)
        for rows in (32, 128):
            mass_case(length, rows)


BENCHES = {
    "prefill": bench_prefill,
    "decode": bench_decode,
    "few": bench_few,
    "memory": bench_memory,
    "select": bench_select,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(BENCHES), help="comma-separated: " + ", ".join(BENCHES))
    names = parser.parse_args(argv).only.split(",")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    torch.manual_seed(0)
    for name in names:
        BENCHES[name]()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
