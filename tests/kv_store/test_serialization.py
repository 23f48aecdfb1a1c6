"""Chunks as bytes: they come back as they were put, and nothing else ever comes back."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kv_store.stored_chunks import MODEL, OTHER_MODEL, PAGE, chunk, key, same
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.kv_store.host_memory import aligned_empty
from vllm_blend.kv_store.layout import PACK_BELOW, ChunkFault, ChunkLayout, StoredFormat
from vllm_blend.kv_store.quantization import NotQuantizable
from vllm_blend.kv_store.serialization import ChunkHeader, check_key, from_bytes, serialize, to_bytes
from vllm_blend.ops.e4m3 import e4m3_to_float

KEY = key(7)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def stored(kv: ChunkKV, how: StoredFormat) -> bytes:
    return to_bytes(serialize(KEY, MODEL, kv, ChunkLayout.from_kv(kv, how)))


def random_kv(layers: int, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> ChunkKV:
    return ChunkKV(*torch.randn(2, layers, tokens, heads, head_dim, generator=torch.manual_seed(3)).to(dtype))


layouts = st.builds(
    ChunkLayout,
    num_layers=st.integers(1, 40),
    num_tokens=st.integers(1, 300),
    num_kv_heads=st.integers(1, 9),
    head_dim=st.integers(1, 130),
    dtype=st.sampled_from(DTYPES),
    format=st.sampled_from(["auto", "fp8", "int8"]),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 5, 2, 8), (1, 1, 1, 1), (2, 300, 8, 128)])
def test_a_chunk_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    kv = random_kv(*shape, dtype)
    assert same(from_bytes(stored(kv, "auto"), KEY, MODEL), kv)


def test_views_come_back_too() -> None:
    large = torch.randn(3, 2, 50, 2, 8)
    kv = ChunkKV(large[:, 0, 2:9], large[:, 1, 2:9])
    assert same(from_bytes(stored(kv, "auto"), KEY, MODEL), kv)


@settings(max_examples=200, deadline=None)
@given(layout=layouts)
def test_every_layer_is_one_piece_and_large_ones_are_pages(layout: ChunkLayout) -> None:
    end = 0
    for layer in range(layout.num_layers):
        start, stop = layout.layer_span(layer)
        assert start >= end and stop - start == layout.layer_bytes
        assert start % (PAGE if layout.layer_bytes >= PACK_BELOW else 16) == 0
        end = stop
    assert end <= layout.payload_bytes and layout.payload_bytes % PAGE == 0
    # What the alignment costs: a page, and 1/64, or 16 bytes a layer.
    assert layout.payload_bytes - layout.num_layers * layout.layer_bytes < PAGE + max(
        layout.num_layers * layout.layer_bytes / 64, layout.num_layers * 16
    )
    kv = layout.kv_in(torch.empty(layout.kv_bytes, dtype=torch.uint8, device="meta"))
    assert kv.k.shape == (layout.num_layers, *layout.layer_shape) and kv.k.dtype == layout.dtype
    assert kv.k.stride() == kv.v.stride()


@pytest.mark.parametrize("tokens", [48, 64, 128, 256, 1000])
@pytest.mark.parametrize("shape", [(12, 2, 64), (28, 8, 128), (32, 8, 128), (24, 2, 64)])
def test_int8_takes_at_most_52_percent_of_bfloat16(shape: tuple[int, int, int], tokens: int) -> None:
    layers, heads, head_dim = shape
    plain = ChunkLayout(layers, tokens, heads, head_dim, torch.bfloat16, "auto")
    for how in ("int8", "fp8"):
        assert replace(plain, format=how).payload_bytes <= 0.52 * plain.payload_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1e-6, 1.0, 100.0])
def test_int8_is_near_the_step_of_each_channel_of_k_and_each_token_of_v(dtype: torch.dtype, spread: float) -> None:
    k, v = torch.randn(2, 3, 40, 2, 16, generator=torch.manual_seed(0))
    k *= torch.logspace(-2, 2, 16)  # channels of K, and tokens of V, differ by four orders of magnitude
    v *= torch.logspace(-2, 2, 40)[:, None, None]
    kv = ChunkKV((k * spread).to(dtype), (v * spread).to(dtype))
    found = from_bytes(stored(kv, "int8"), KEY, MODEL)
    for got, expected, dims in ((found.k, kv.k, (1,)), (found.v, kv.v, (2, 3))):
        assert got.dtype == dtype
        largest = expected.float().abs().amax(dims, keepdim=True)
        step = largest / 127 * 2 ** (1 / 16)
        rounding = largest * torch.finfo(dtype).eps + torch.finfo(dtype).tiny
        assert bool(((got.float() - expected.float()).abs() <= step / 2 * 1.0001 + rounding).all())


def test_a_channel_of_nothing_next_to_others_stays_almost_nothing() -> None:
    k = torch.randn(1, 20, 1, 4)
    k[..., 1] *= 1e-9
    k[..., 2] = 0
    found = from_bytes(stored(ChunkKV(k, k), "int8"), KEY, MODEL)
    assert float(found.k[..., 1].abs().max()) <= float(k.abs().max()) * 2**-16 / 127
    assert not found.k[..., 2].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("largest", [1e-3, 1.0, 60000.0])
def test_fp8_keeps_three_bits_of_every_number_and_its_range(dtype: torch.dtype, largest: float) -> None:
    k, v = torch.rand(2, 3, 40, 2, 16, generator=torch.manual_seed(0)) * 0.9 + 0.1
    kv = ChunkKV((k * largest).to(dtype), (-v * largest).to(dtype))
    found = from_bytes(stored(kv, "fp8"), KEY, MODEL)
    for got, expected in ((found.k, kv.k), (found.v, kv.v)):
        error = (got.float() - expected.float()).abs() / expected.float().abs()
        assert float(error.max()) <= 2**-4 + 2 * torch.finfo(dtype).eps


def test_every_finite_number_of_e4m3_is_decoded() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = numbers[numbers.float().isfinite()]
    assert len(numbers) == 254 and torch.equal(e4m3_to_float(numbers), numbers.float())


@pytest.mark.parametrize("how", ["int8", "fp8"])
def test_zeros_stay_zeros(how: StoredFormat) -> None:
    kv = ChunkKV(torch.zeros(2, 3, 2, 4), torch.zeros(2, 3, 2, 4))
    assert same(from_bytes(stored(kv, how), KEY, MODEL), kv)


@pytest.mark.parametrize("how", ["int8", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["k", "v"])
def test_what_is_not_a_number_cannot_be_quantized(how: StoredFormat, value: float, where: str) -> None:
    kv = random_kv(2, 3, 2, 4, torch.float32)
    getattr(kv, where)[1, 2, 1, 3] = value
    with pytest.raises(NotQuantizable, match="not finite"):
        stored(kv, how)


@pytest.mark.parametrize("how", ["int8", "fp8"])
@pytest.mark.parametrize("scale", [1e37, 1e-38, 1e-44])
def test_the_range_of_float32_is_kept(how: StoredFormat, scale: float) -> None:
    kv = ChunkKV(*(torch.rand(2, 1, 9, 2, 4) * scale))
    found = from_bytes(stored(kv, how), KEY, MODEL)
    assert bool(found.k.isfinite().all())
    if scale > 1e-38:
        assert float((found.k - kv.k).abs().max()) <= scale / 16


@cache
def example(how: StoredFormat) -> tuple[bytes, ChunkKV]:
    data = stored(chunk(KEY), how)
    return data, from_bytes(data, KEY, MODEL)


@settings(max_examples=300, deadline=None)
@given(how=st.sampled_from(["auto", "int8", "fp8"]), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_changes_what_is_read(how: StoredFormat, where: float, bit: int) -> None:
    data, expected = example(how)
    flipped = bytearray(data)
    flipped[int(where * len(data))] ^= 1 << bit
    try:
        found = from_bytes(bytes(flipped), KEY, MODEL)
    except ChunkFault:
        return
    assert same(found, expected)  # a byte of padding


@pytest.mark.parametrize("how", ["auto", "int8", "fp8"])
def test_every_byte_of_the_header_and_every_layer_counts(how: StoredFormat) -> None:
    data, _ = example(how)
    layout = ChunkLayout.from_kv(chunk(KEY), how)
    start = len(data) - layout.payload_bytes
    spans = [layout.layer_span(layer) for layer in range(layout.num_layers)]
    places = [*range(start), *(start + at for a, b in spans for at in (a, (a + b) // 2, b - 1))]
    for at in places:
        flipped = bytearray(data)
        flipped[at] ^= 0x40
        with pytest.raises(ChunkFault):
            from_bytes(bytes(flipped), KEY, MODEL)


@settings(max_examples=100, deadline=None)
@given(share=st.floats(0, 1, exclude_max=True), longer=st.booleans())
def test_a_part_is_not_a_chunk(share: float, longer: bool) -> None:
    data, _ = example("auto")
    with pytest.raises(ChunkFault):
        from_bytes(data + b"\0" if longer else data[: int(share * len(data))], KEY, MODEL)


@pytest.mark.parametrize(
    ("name", "model", "reason"), [(key(8), MODEL, "another chunk"), (KEY, OTHER_MODEL, "another model")]
)
def test_another_chunk_and_another_model_are_foreign(name: str, model: str, reason: str) -> None:
    with pytest.raises(ChunkFault, match=reason) as caught:
        from_bytes(example("auto")[0], name, model)
    assert caught.value.kind == "foreign"


def test_other_data_is_foreign() -> None:
    with pytest.raises(ChunkFault) as caught:
        ChunkHeader.decode(b"x" * 200, KEY, MODEL)
    assert caught.value.kind == "foreign"


def test_another_version_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    header = serialize(KEY, MODEL, chunk(KEY), ChunkLayout.from_kv(chunk(KEY), "auto")).header
    monkeypatch.setattr("vllm_blend.kv_store.serialization.VERSION", 9)
    data = header.encode()
    monkeypatch.undo()
    with pytest.raises(ChunkFault, match="format version 9, this package reads 1"):
        ChunkHeader.decode(data, KEY, MODEL)


def test_nothing_of_other_memory_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    def dirty(num_bytes: int) -> torch.Tensor:
        return aligned_empty(num_bytes).fill_(0xEE)

    monkeypatch.setattr("vllm_blend.kv_store.serialization.aligned_empty", dirty)
    for tokens, head_dim in ((3, 4), (520, 130)):
        kv = ChunkKV(*torch.zeros(2, 2, tokens, 2, head_dim, dtype=torch.bfloat16))
        assert not serialize(KEY, MODEL, kv, ChunkLayout.from_kv(kv, "auto")).payload.any()


def test_what_cannot_be_stored_is_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match=r"float64.*must have one dtype of float32, float16, bfloat16"):
        ChunkLayout.from_kv(random_kv(1, 1, 1, 1, torch.float64), "auto")
    with pytest.raises(ValueError, match=r"\[2, 0, 1, 1\] must not be empty"):
        ChunkLayout.from_kv(random_kv(2, 0, 1, 1, torch.float32), "auto")
    for name in ("", "x" * 32, "ab" * 15, "AB" * 16, "../" * 8):
        with pytest.raises(ValueError, match="32 hex digits"):
            check_key(name)
