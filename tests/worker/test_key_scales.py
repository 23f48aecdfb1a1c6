"""Keys that are scaled on their way to a request's pages: by every way there, for every kind of RoPE, rounded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.engines import tiny_model
from tests.worker.test_chunk_placement import Load, Ring
from vllm_blend.blend.plan import Segment
from vllm_blend.kv_store.chunk_kv import ChunkKV
from vllm_blend.layers.rotary import RotaryEmbedding
from vllm_blend.models.causal_lm import attention_layers
from vllm_blend.models.loader import load_hf_config, load_model
from vllm_blend.worker import chunk_placement
from vllm_blend.worker.chunk_placement import ChunkPlacement
from vllm_blend.worker.kv_cache import CacheShape, KVCache

pytestmark = pytest.mark.cpu_only
CPU = torch.device("cpu")
# Rotated whole; rotated in part; layers without RoPE; tables of their own for some layers.
MODELS = ["llama", "phi3", "smollm3", "gemma3"]
LENGTHS = (5, 3, 11, 7)
STARTS = (0, 5, 8, 40)  # the last chunk stands behind a hole
SCALES = (1.0, 0.9, 1.0, 0.5)
BLOCK = 4


@dataclass
class Arriving:
    """Layers of a chunk that are NaN until the forward pass waits for them."""

    kv: ChunkKV
    source: ChunkKV
    waited: list[int] = field(default_factory=list)
    is_whole = is_lost = False
    bytes_left = 0

    def wait_layer(self, layer: int) -> None:
        self.waited.append(layer)
        self.kv.k[layer], self.kv.v[layer] = self.source.k[layer], self.source.v[layer]


def arriving(source: ChunkKV) -> ChunkKV:
    empty = ChunkKV(torch.full_like(source.k, torch.nan), torch.full_like(source.v, torch.nan))
    return replace(empty, arriving=Arriving(empty, source))


def rotated(k: torch.Tensor, rotary: RotaryEmbedding, positions: Sequence[int]) -> torch.Tensor:
    """K [tokens, kv_heads, head_dim] of a layer, rotated in float64."""
    at = torch.tensor(positions)
    cos, sin = (table[at].double()[:, None] for table in (rotary.cos, rotary.sin))
    half = cos.shape[-1]
    first, second, rest = k.double().split([half, half, k.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


@dataclass(frozen=True)
class Case:
    """The layers of a model with a cache of NaN, and chunks."""

    placement: ChunkPlacement
    chunks: list[ChunkKV]

    @classmethod
    def of(cls, model: str, dtype: torch.dtype) -> Case:
        directory = tiny_model(model)
        loaded: Any = load_model(load_hf_config(directory), directory, dtype, CPU, max_position=96)
        layers = attention_layers(loaded)
        heads, head_dim = layers[0].num_kv_heads, layers[0].head_dim
        cache = KVCache.allocate(CacheShape(len(layers), heads, head_dim, dtype), 64, BLOCK, CPU)
        cache.key.fill_(torch.nan)
        cache.value.fill_(torch.nan)
        random = torch.Generator().manual_seed(5)
        pairs = [torch.randn(2, len(layers), n, heads, head_dim, generator=random).to(dtype) for n in LENGTHS]
        return cls(ChunkPlacement(loaded, cache), [ChunkKV(pair[0], pair[1]) for pair in pairs])

    def request(self, table: Sequence[int], scales: Sequence[float], chunks: Sequence[ChunkKV]) -> Any:
        segments = [
            Segment(start, kv, key_scale=scale) for start, kv, scale in zip(STARTS, chunks, scales, strict=True)
        ]
        return SimpleNamespace(block_table=list(table), blend=SimpleNamespace(segments=tuple(segments)))

    def stored(self, request: Any, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pages' K and V of a chunk, [layers, tokens, kv_heads, head_dim] each."""
        where = torch.arange(STARTS[index], STARTS[index] + LENGTHS[index])
        slots = torch.tensor(request.block_table)[where // BLOCK] * BLOCK + where % BLOCK
        k, v = (pages.flatten(1, 2)[:, slots] for pages in (self.placement.cache.key, self.placement.cache.value))
        return k, v

    def exact(self, index: int, scale: float) -> torch.Tensor:
        """Return the scaled keys of a chunk in float64."""
        at = range(STARTS[index], STARTS[index] + LENGTHS[index])
        rotaries = self.placement.rotaries
        return scale * torch.stack(
            [rotated(k, rotary, at) for k, rotary in zip(self.chunks[index].k, rotaries, strict=True)]
        )


def place(case: Case, requests: Sequence[Any]) -> None:
    """Place what is placed at once, and then layer by layer what arrives."""
    hooks = case.placement.start(requests)
    for layer in range(len(case.placement.rotaries)):
        for hook in hooks:
            hook.before_layer(layer)


@pytest.fixture(params=["at once", "from pinned memory", "from a disk", "in part from a disk"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(chunk_placement, "LayerwiseLoad", Load)
    yield request.param
    Load.made = []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("model", MODELS)
def test_keys_are_scaled_and_rounded_once(model: str, dtype: torch.dtype, way: str, monkeypatch: Any) -> None:
    """A second request of the step has the same chunks as they are, and values are never scaled."""
    case = Case.of(model, dtype)
    chunks = case.chunks
    if way == "from pinned memory":
        monkeypatch.setattr(case.placement, "ring", Ring())
    elif way != "at once":
        chunks = [arriving(kv) if way == "from a disk" or n % 2 else kv for n, kv in enumerate(chunks)]
    tables = torch.randperm(63, generator=torch.Generator().manual_seed(3)).tolist()
    damped, plain = case.request(tables[:12], SCALES, chunks), case.request(tables[12:24], (1.0,) * 4, chunks)
    place(case, [damped, plain])
    unit = torch.finfo(dtype).eps / 2
    slack = 1e-4 * unit if dtype == torch.bfloat16 else 4 * unit  # float32 is what rotates
    for request, scales in ((damped, SCALES), (plain, (1.0,) * 4)):
        for index, scale in enumerate(scales):
            k, v = case.stored(request, index)
            assert torch.equal(v, case.chunks[index].v)
            expected = case.exact(index, scale)
            largest = case.chunks[index].k.double().abs().amax(-1, keepdim=True)
            error = (k.double() - expected).abs()
            assert (error <= unit * expected.abs() + slack * largest + 1e-7).all(), (index, scale)
    assert case.placement.cache.key.isnan().any()  # no other slot was written
    written = (~case.placement.cache.key[0].flatten(0, 1).isnan()).any(-1).any(-1).sum()
    assert written == 2 * sum(LENGTHS)


@pytest.mark.parametrize("model", MODELS[:3])
def test_a_scale_of_one_changes_no_bit(model: str) -> None:
    """Beside a chunk that is scaled."""
    case = Case.of(model, torch.bfloat16)
    alone, beside = case.request(range(12), (1.0,) * 4, case.chunks), case.request(range(20, 32), SCALES, case.chunks)
    place(case, [alone])
    place(case, [beside])
    for index, scale in enumerate(SCALES):
        same = torch.equal(case.stored(alone, index)[0], case.stored(beside, index)[0])
        assert same is (scale == 1.0)
