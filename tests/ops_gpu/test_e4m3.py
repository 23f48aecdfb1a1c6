"""Kernels over pages of e4m3 write what torch rounds to, and compute what float64 makes of the rounded numbers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.ops import shifts
from tests.ops.head_pages import decode_problem, window_problem
from tests.ops_gpu import pages
from tests.ops_gpu.pages import HEAD_DIMS
from tests.ops_gpu.reference import DEVICE, TOLERANCE, VARIANTS, assert_close, make_problem, probabilities
from tests.ops_gpu.test_cache import rotate64, tables
from tests.ops_gpu.test_decode_attention import check as check_decode
from tests.ops_gpu.test_kv_compress import assert_near, on_gpu
from tests.ops_gpu.test_prefill_attention import check as check_prefill
from vllm_blend import ops
from vllm_blend.attention.registry import make_usable
from vllm_blend.attention.self_check import HeadLayout
from vllm_blend.features.kv_compress import cuda_ops as cuda_kv_compress
from vllm_blend.ops import cuda_attention
from vllm_blend.ops.deviation import kv_deviation_reference
from vllm_blend.ops.e4m3 import E4M3, as_bytes, narrowed, widened
from vllm_blend.ops.paged_kv import PagedKV

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]
EVERY = torch.arange(256, dtype=torch.uint8).view(E4M3)
UNWRITTEN = 0x7F  # NaN


def empty_cache(blocks: int, kv_heads: int, head_dim: int) -> PagedKV:
    shape = (blocks, 16, kv_heads, head_dim)
    return PagedKV(*(torch.full(shape, UNWRITTEN, dtype=torch.uint8, device=DEVICE).view(E4M3) for _ in "kv"))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round on the host, by torch alone; the bytes."""
    return as_bytes(x.cpu().float().clamp(-448, 448).to(E4M3))


def slots_of(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The bytes in some slots, on the host."""
    return as_bytes(cache).flatten(0, 1)[slots].cpu()


def assert_written(kv: PagedKV, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ties: float = 1e-3) -> None:
    """V is `v` rounded; K is `k` rounded but for numbers that float32 and float64 put on two sides of a midpoint, at
    most `ties` of them; no other slot is written."""
    assert torch.equal(slots_of(kv.value, slots), rounded(v))
    wrote, wanted = slots_of(kv.key, slots), rounded(k)
    if ties == 0:
        assert torch.equal(wrote, wanted)
    elif len(slots):
        assert (wrote != wanted).float().mean() <= ties
        as_floats = (x.view(E4M3).float() for x in (wrote, wanted))
        torch.testing.assert_close(*as_floats, rtol=2.0**-3, atol=2.0**-9)
    others = torch.ones(kv.num_slots, dtype=torch.bool, device=DEVICE)
    others[slots] = False
    for cache in (kv.key, kv.value):
        assert bool((as_bytes(cache).flatten(0, 1)[others] == UNWRITTEN).all())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_every_number_is_widened_and_narrowed(dtype: torch.dtype) -> None:
    """By plain torch on the GPU, which `torch_native` uses."""
    on_device = EVERY.to(DEVICE)
    torch.testing.assert_close(widened(on_device, dtype).cpu(), EVERY.to(dtype), rtol=0, atol=0, equal_nan=True)
    finite = EVERY.float().isfinite()
    again = narrowed(EVERY.float().to(DEVICE, dtype), E4M3).cpu()
    assert torch.equal(as_bytes(again)[finite], as_bytes(EVERY)[finite])


@pytest.mark.parametrize("dtype", DTYPES)
def test_writing_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    """All midpoints between two numbers, numbers of every size beside them, and what is too large."""
    numbers = EVERY.float()[EVERY.float().isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    sizes = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 4096)
    x = torch.cat([numbers, middles, middles * 1.01, sizes, torch.tensor([torch.inf, -torch.inf, 449.0, -0.0])])
    x = torch.cat([x, x.new_zeros(-len(x) % 128)]).to(dtype).view(-1, 2, 64).to(DEVICE)
    kv = empty_cache(len(x) // 16 + 2, 2, 64)
    slots = torch.randperm(kv.num_slots, device=DEVICE)[: len(x)]
    ops.reshape_and_cache(x, -x, kv, slots)
    assert_written(kv, slots, x, -x, ties=0)
    ops.reshape_and_cache(torch.full_like(x, torch.nan), x, kv, slots)
    assert bool((slots_of(kv.key, slots) & 0x7F == 0x7F).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "half"), [(64, 32), (80, 40), (96, 48), (128, 64), (256, 128), (128, 32), (80, 16)]
)
@pytest.mark.parametrize("tokens", [0, 1, 53])
def test_rotating_and_writing(tokens: int, head_dim: int, half: int, dtype: torch.dtype) -> None:
    """K is rotated in float32 and rounded once; q is rotated in its own dtype. Some tokens are not stored."""
    torch.manual_seed(head_dim)
    packed = torch.randn(tokens, 10, head_dim, device=DEVICE).to(dtype)
    before = packed.clone()
    cos, sin = (t[torch.randint(0, 500, (tokens,))] for t in tables(500, half))
    kv = empty_cache(8, 2, head_dim)
    slots = torch.randperm(128, device=DEVICE)[:tokens]
    slots[2:3] = -1
    q, k, v = packed.split([6, 2, 2], 1)
    out = ops.rotary_and_cache(q, k, v, cos, sin, kv, slots)
    assert_close(out, rotate64(before[:, :6], cos, sin), TOLERANCE[dtype])
    kept = slots >= 0
    assert_written(kv, slots[kept], rotate64(before[:, 6:8], cos, sin)[kept], before[kept, 8:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_norms_before_the_rotation(head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(head_dim)
    packed = (torch.randn(53, 12, head_dim, device=DEVICE) * 3).to(dtype)
    q, k, v = packed.split([8, 2, 2], 1)
    weights = [(1 + torch.randn(head_dim, device=DEVICE) / 4).to(dtype) for _ in "qk"]
    cos, sin = (t[:53] for t in tables(60, head_dim // 2))
    kv, slots = empty_cache(8, 2, head_dim), torch.randperm(128, device=DEVICE)[:53]
    normed = ops.rms_norm(k.contiguous(), weights[1], 1e-6)
    values = v.clone()
    ops.rotary_and_cache(q, k, v, cos, sin, kv, slots, ops.HeadNorms(weights[0], weights[1], 1e-6))
    # A head's mean square is added up in another order, which moves some of its numbers to their neighbours.
    assert_written(kv, slots, rotate64(normed, cos, sin), values, ties=0.03)


@pytest.mark.parametrize(
    ("head_dim", "half"), [(64, 32), (80, 40), (96, 48), (128, 64), (256, 128), (128, 32), (80, 16)]
)
def test_placing_chunks(head_dim: int, half: int) -> None:
    """A stretch of a chunk of e4m3 that begins at any token, into all layers."""
    torch.manual_seed(head_dim)
    layers, tokens, kv_heads = 3, 37, 3
    stored = narrowed(torch.randn(2, layers, tokens + 5, kv_heads, head_dim, device=DEVICE), E4M3)
    k, v = stored[:, :, 3 : 3 + tokens]
    pool = torch.full((2, layers, 9, 16, kv_heads, head_dim), UNWRITTEN, dtype=torch.uint8, device=DEVICE).view(E4M3)
    slots = torch.randperm(144, device=DEVICE)[:tokens]
    slots[5] = -1
    cos, sin = (t[torch.randint(0, 1000, (tokens,))] for t in tables(1000, half))
    ops.place_chunks([(k, v)], cos, sin, pool[0], pool[1], slots)
    kept = slots >= 0
    for layer in range(layers):
        expected = rotate64(k[layer].float(), cos, sin)[kept]
        values = v[layer].float()[kept]
        assert_written(PagedKV(pool[0, layer], pool[1, layer]), slots[kept], expected, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [None, 70])
def test_decoding(window: int | None, head_dim: int, dtype: torch.dtype) -> None:
    one = make_problem([1, 15, 16, 17, 333, 1000], [1] * 6, head_dim=head_dim, dtype=dtype, cache_dtype=E4M3)
    check_decode(one, window)
    few = make_problem([700, 33, 5, 2000, 64], [4, 2, 0, 1, 4], head_dim=head_dim, dtype=dtype, cache_dtype=E4M3)
    check_decode(few, window, 4)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 40])
def test_groups_that_decode(group: int) -> None:
    check_decode(make_problem([400, 90], [1, 1], q_heads=2 * group, seed=group, cache_dtype=E4M3))


@pytest.mark.parametrize("seed", range(30))
def test_random_batches_that_decode(seed: int) -> None:
    draw = random.Random(seed)
    kv_heads, head_dim, longest = draw.choice([1, 2, 4, 8]), draw.choice([64, 128]), draw.choice([20, 300, 3000])
    lengths = [draw.randint(1, longest) for _ in range(draw.choice([1, 2, 5, 17, 150]))]
    window, heads = draw.choice([None, None, draw.randint(1, longest)]), draw.randint(1, 8) * kv_heads
    sizes = (heads, kv_heads, head_dim, draw.choice([16, 64]), draw.choice(DTYPES), seed)
    check_decode(make_problem(lengths, [1] * len(lengths), *sizes, E4M3), window)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20])
def test_queries_that_float16_cannot_hold(size: float, queries: int) -> None:
    """Rows of bfloat16 of all sizes, and one of zeros. Large ones see a single key, small ones all alike."""
    p = make_problem([300, 90, 17], [queries] * 3, cache_dtype=E4M3)
    sizes = torch.logspace(-3, 3, p.q.shape[0] * p.q.shape[1], device=DEVICE).view(*p.q.shape[:2], 1)
    q = (p.q.double() * sizes * size).to(p.q.dtype)
    q[1, 2] = 0
    check_decode(replace(p, q=q, scale=p.scale / size), None, queries)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_prefilling(head_dim: int, dtype: torch.dtype, variant: str) -> None:
    check_prefill(make_problem([700, 333], [150, 40], head_dim=head_dim, dtype=dtype, cache_dtype=E4M3), variant)
    windowed = make_problem([900, 130, 64], [200, 130, 64], head_dim=head_dim, dtype=dtype, cache_dtype=E4M3)
    check_prefill(windowed, variant, 100)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8])
def test_groups_that_prefill(group: int, variant: str) -> None:
    check_prefill(make_problem([400, 90], [120, 90], q_heads=2 * group, seed=group, cache_dtype=E4M3), variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_much_work_and_split_keys(block_size: int, variant: str) -> None:
    """Several whole tiles a block; few long tiles that are split; lone tokens and a request without any."""
    check_prefill(make_problem([900] * 12, [300] * 12, 32, 4, 128, block_size, cache_dtype=E4M3), variant)
    check_prefill(make_problem([6000, 50], [20, 3], block_size=block_size, cache_dtype=E4M3), variant, 1500)
    check_prefill(make_problem([1, 40, 129, 300, 128], [1, 0, 1, 1, 128], cache_dtype=E4M3), variant)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "q_heads", "kv_heads", "rows", "window"),
    [(128, 32, 8, 20, None), (64, 14, 2, 1, None), (80, 9, 9, 17, 100), (96, 5, 1, 33, None), (256, 8, 2, 50, 64)],
)
def test_attention_mass(
    head_dim: int, q_heads: int, kv_heads: int, rows: int, window: int | None, dtype: torch.dtype, variant: str
) -> None:
    n = 1030
    p = make_problem([n], [rows], q_heads, kv_heads, head_dim, dtype=dtype, cache_dtype=E4M3)
    expected, lse, _, _ = probabilities(p, 0, window)
    mass = torch.zeros(kv_heads, n, device=DEVICE)
    args = (p.q, lse.float().contiguous(), p.positions, p.kv, p.block_tables[0], mass, p.scale, window, variant)
    cuda_attention.attention_mass(*args)
    assert_close(mass.sum(0), expected.sum(1).mean(0), 3e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(1, 64), (3, 80), (8, 128), (2, 256)])
def test_deviation(kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    cache = narrowed(torch.randn(6, 16, kv_heads, head_dim, device=DEVICE), E4M3)
    fresh = torch.randn(77, kv_heads + 1, head_dim, device=DEVICE).to(dtype)[:, 1:]
    slots, rows = torch.randperm(96, device=DEVICE)[:77], torch.randperm(77, device=DEVICE)[:30]
    expected = kv_deviation_reference(fresh.double(), cache.double(), slots)
    assert_close(ops.kv_deviation(fresh, cache, slots), expected, 1e-5)
    assert_close(ops.kv_deviation(fresh, cache, slots, rows), expected[rows], 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_sums_of_kv_compress(head_dim: int, dtype: torch.dtype) -> None:
    window = window_problem(333, 32, 8, 2, head_dim, dtype, power=2)
    keys = narrowed(window.key_cache, E4M3)
    q, _, *rest = window.arguments(dtype)
    sums = cuda_kv_compress.window_sums(*on_gpu((q, PagedKV(keys, keys), *rest)))
    assert_near(sums, replace(window, key_cache=keys.float()).expected())
    decode = decode_problem([1, 15, 16, 17, 333, 0, 1000], 4, head_dim, dtype, power=1)
    keys, zeros = narrowed(decode.head_keys, E4M3), torch.zeros_like(decode.metric)
    exact = replace(decode, head_keys=keys.float(), metric=zeros)
    for lse in ((), (exact.lse(),)):
        metric, q, _, *rest = on_gpu(decode.arguments(dtype, zeros.clone()))
        cuda_kv_compress.accumulate_sums(metric, q, PagedKV(keys.to(DEVICE), keys.to(DEVICE)), *rest, *on_gpu(lse))
        assert_near(metric, exact.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored_on", [DEVICE, "cpu"])
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (128, 64), (80, 16)])
def test_mean_shift(head_dim: int, half: int, stored_on: str, dtype: torch.dtype) -> None:
    """Chunks and pages of e4m3, computed rows of another dtype; against plain torch."""
    shape = shifts.Shape(((300, 512), (77,) * 9), gap=1, share=0.15, kv_heads=3, head_dim=head_dim, half=half, seed=2)
    problem = shifts.make_problem(shape, 16, dtype, DEVICE, stored_on)
    segments = [replace(each, k=narrowed(each.k, E4M3), v=narrowed(each.v, E4M3)) for each in problem.segments]
    problem = replace(problem, segments=segments)
    ours, twin = (empty_cache(problem.num_blocks, 3, head_dim) for _ in range(2))
    plan = problem.run(ours)
    problem.run_reference(twin)
    assert plan.table is not None, "plain torch ran"
    moved = plan.slots[plan.slots >= 0]
    for cache, other in ((ours.key, twin.key), (ours.value, twin.value)):
        wrote, wanted = slots_of(cache, moved), slots_of(other, moved)
        assert (wrote != wanted).float().mean() <= 2e-3  # the means are added up in another order
        as_floats = (x.view(E4M3).float() for x in (wrote, wanted))
        torch.testing.assert_close(*as_floats, rtol=2.0**-3, atol=2.0**-9)
        others = torch.ones(ours.num_slots, dtype=torch.bool, device=DEVICE)
        others[moved] = False
        assert bool((as_bytes(cache).flatten(0, 1)[others] == UNWRITTEN).all())


@pytest.mark.parametrize("name", ["cuda", "torch_native"])
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 64), (torch.bfloat16, 80)])
def test_backends(name: str, dtype: torch.dtype, head_dim: int) -> None:
    """A step of all kinds of work computes what plain torch does, and pages of another layout change nothing."""
    make_usable(name, HeadLayout(torch.device(DEVICE), dtype, 8, 2, head_dim, fp8_cache=True))


@pytest.mark.parametrize("layout", ["one pool", "heads outside", "layers"])
def test_layouts_of_pages(layout: str) -> None:
    p = make_problem([300, 77], [64, 77], cache_dtype=E4M3)
    where = pages.make_cache(pages.Shape(layout, 16, 2, 4, 128, torch.bfloat16), p.key.shape[0])
    caches = []
    for cache, like in zip((p.key, p.value), where, strict=True):
        storage = torch.empty(like.untyped_storage().nbytes() // 2, dtype=torch.uint8, device=DEVICE)
        view = storage.as_strided(like.shape, like.stride(), like.storage_offset())
        view.copy_(as_bytes(cache))
        caches.append(view.view(E4M3))
    for variant in ("auto", "mma"):
        check_prefill(replace(p, key=caches[0], value=caches[1]), variant)


def test_what_does_not_fit_is_an_error() -> None:
    p = make_problem([40, 30], [1, 1], cache_dtype=E4M3)
    plan = cuda_attention.plan_decode(p.positions, p.block_tables, p.kv, 8)
    with pytest.raises(TypeError, match=r"q is torch.float32, but must be torch.float16 or torch.bfloat16"):
        cuda_attention.attention(p.q.float(), p.kv, plan, p.scale)
    half = make_problem([40, 30], [1, 1])
    plan = cuda_attention.plan_decode(half.positions, half.block_tables, half.kv, 8)
    with pytest.raises(TypeError, match=r"q is torch.float16, but must be torch.bfloat16"):
        cuda_attention.attention(half.q.half(), half.kv, plan, half.scale)
