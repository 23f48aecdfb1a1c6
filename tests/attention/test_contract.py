"""The attention contract, on every backend: random sets of positions against a dense computation in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_blend.attention import torch_native
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata, LayerStep
from vllm_blend.attention.registry import KINDS, make_backend
from vllm_blend.attention.self_check import HeadLayout
from vllm_blend.ops.paged_kv import PagedKV

CPU = torch.device("cpu")
TOLERANCE = 2e-5


@dataclass(frozen=True)
class Step:
    """A step with its keys and values written out, one [seq_len, kv_heads, head_dim] pair per request."""

    q: torch.Tensor
    cache: PagedKV
    metadata: AttentionMetadata
    scale: float
    window: int | None
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    sinks: torch.Tensor | None = None

    @property
    def layer(self) -> LayerStep:
        return LayerStep(self.q, self.cache, self.metadata, self.scale, self.window, 0, self.sinks)


LAYOUT = HeadLayout(CPU, torch.float32, 8, 8, 64)


@pytest.fixture(params=[name for name, kind in KINDS.items() if kind.unfit(LAYOUT) is None])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return make_backend(request.param, CPU, torch.float32, 64)  # where the compiled one was not built, this raises


def make_step(
    lengths: list[int],
    positions: list[list[int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    seed: int,
) -> Step:
    """Requests of `lengths` keys on shuffled blocks. Whatever no request wrote is NaN: stale memory must not matter."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in lengths]
    free = (torch.randperm(sum(counts) + 2, generator=random) + 1).tolist()  # block 0 is padding
    shape = (sum(counts) + 3, block_size, kv_heads, head_dim)
    cache = PagedKV(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    keys, values, slots, starts = [], [], [], [0]
    for request, (n, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = torch.tensor([free.pop() for _ in range(count)])
        tables[request, :count] = blocks
        at = torch.arange(n)
        slot = blocks[at // block_size] * block_size + at % block_size
        k, v = (torch.randn(n, kv_heads, head_dim, generator=random) for _ in range(2))
        cache.key.flatten(0, 1)[slot] = k
        cache.value.flatten(0, 1)[slot] = v
        keys.append(k)
        values.append(v)
        slots.append(slot[torch.tensor(positions[request], dtype=torch.int64)])
        starts.append(starts[-1] + len(positions[request]))
    q = torch.randn(starts[-1], kv_heads * group, head_dim, generator=random)
    flat = torch.tensor([p for each in positions for p in each], dtype=torch.int64)
    metadata = AttentionMetadata(flat, torch.cat(slots), tables, starts, list(lengths))
    return Step(q, cache, metadata, head_dim**-0.5, window, keys, values)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Full prefills, scattered ones, decodes and requests that rest, mixed."""
    lengths = draw(st.lists(st.integers(1, 70), min_size=1, max_size=5))
    positions = []
    for n in lengths:
        kind = draw(st.sampled_from(["all", "scattered", "tail", "decode", "one", "none"]))
        chosen = {
            "all": list(range(n)),
            "scattered": sorted(draw(st.sets(st.integers(0, n - 1)))),
            "tail": list(range(draw(st.integers(0, n - 1)), n)),
            "decode": [n - 1],
            "one": [draw(st.integers(0, n - 1))],
            "none": [],
        }
        positions.append(chosen[kind])
    return make_step(
        lengths,
        positions,
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([16, 64, 80])),
        block_size=draw(st.sampled_from([8, 16])),
        window=draw(st.one_of(st.none(), st.integers(1, 80))),
        seed=draw(st.integers(0, 2**16)),
    )


def dense(step: Step, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities [heads, queries, seq_len] and outputs [queries, heads, head_dim], query by query, in float64."""
    rows = step.metadata.rows(request)
    k, v = step.keys[request].double(), step.values[request].double()
    heads, n = step.q.shape[1], len(k)
    group = heads // k.shape[1]
    probabilities = torch.zeros(heads, rows.stop - rows.start, n, dtype=torch.float64)
    outputs = torch.zeros(rows.stop - rows.start, *step.q.shape[1:], dtype=torch.float64)
    for index, row in enumerate(range(rows.start, rows.stop)):
        last = int(step.metadata.positions[row])
        first = 0 if step.window is None else max(0, last - step.window + 1)
        for head in range(heads):
            scores = k[first : last + 1, head // group] @ step.q[row, head].double() * step.scale
            if step.sinks is not None:
                scores = torch.cat([scores, step.sinks[head : head + 1].double()])
            weights = scores.softmax(0)[: last + 1 - first]
            probabilities[head, index, first : last + 1] = weights
            outputs[index, head] = weights @ v[first : last + 1, head // group]
    return probabilities, outputs


def check(backend: AttentionBackend, step: Step) -> None:
    out = backend.attend(step.layer)
    assert out.shape == step.q.shape
    halves = [rows_half(step.metadata.rows(r)) for r in range(step.metadata.num_requests)]
    masses = backend.attention_mass(step.layer, halves)
    for request in range(step.metadata.num_requests):
        rows = step.metadata.rows(request)
        probabilities, expected = dense(step, request)
        torch.testing.assert_close(out[rows].double(), expected, rtol=TOLERANCE, atol=TOLERANCE)
        half = halves[request]
        mass = probabilities[:, half.start - rows.start : half.stop - rows.start].sum(1).mean(0)
        torch.testing.assert_close(masses[request].double(), mass, rtol=TOLERANCE, atol=TOLERANCE)


def rows_half(rows: slice) -> slice:
    """The later half of a request's rows, as a suffix is."""
    return slice((rows.start + rows.stop) // 2, rows.stop)


@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_torch_native_sees_exactly_what_came_before(step: Step) -> None:
    check(make_backend("torch_native", CPU, torch.float32, 64), step)


@settings(max_examples=60, deadline=None)
@given(step=steps())
def test_compiled_kernels_see_exactly_what_came_before(step: Step) -> None:
    check(make_backend("cpu", CPU, torch.float32, 64), step)


@settings(max_examples=60, deadline=None)
@given(step=steps(), high=st.sampled_from([-30.0, 0.0, 4.0, 30.0]))
def test_sinks_take_their_part(step: Step, high: float) -> None:
    sinks = torch.randn(step.q.shape[1], generator=torch.Generator().manual_seed(0)) + high
    for name in ("torch_native", "cpu"):
        check(make_backend(name, CPU, torch.float32, 64, sinks=True), replace(step, sinks=sinks))


@pytest.mark.parametrize("window", [None, 40])
def test_more_queries_than_a_tile_with_sinks(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_native, "QUERY_TILE", 16)
    step = make_step([150, 60], [list(range(0, 150, 2)), list(range(60))], 2, 3, 16, 16, window, seed=5)
    sinks = torch.linspace(-2, 4, 6)
    check(make_backend("torch_native", CPU, torch.float32, 64, sinks=True), replace(step, sinks=sinks))


@pytest.mark.parametrize("window", [None, 40])
def test_more_queries_than_a_tile(
    backend: AttentionBackend, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_native, "QUERY_TILE", 16)
    scattered = sorted(set(range(0, 150, 3)) | set(range(90, 110)) | {149})
    step = make_step([150, 60, 9], [scattered, list(range(60)), [8]], 2, 3, 16, 16, window, seed=5)
    check(backend, step)


def test_many_decodes_of_unequal_length(backend: AttentionBackend) -> None:
    lengths = [1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 100, 127]
    check(backend, make_step(lengths, [[n - 1] for n in lengths], 2, 2, 64, 16, None, seed=6))


def test_a_request_alone_equals_itself_in_a_batch(backend: AttentionBackend) -> None:
    lengths, positions = [60, 33, 90], [[3, 30, 31, 59], [32], list(range(90))]
    batch = make_step(lengths, positions, 2, 2, 16, 8, None, seed=7)
    together = backend.attend(batch.layer)
    for request in range(3):
        rows = batch.metadata.rows(request)
        alone = AttentionMetadata(
            batch.metadata.positions[rows].clone(),
            batch.metadata.slot_mapping[rows].clone(),
            batch.metadata.block_tables[request : request + 1].clone(),
            [0, rows.stop - rows.start],
            [lengths[request]],
        )
        out = backend.attend(batch.layer.part(rows, alone))
        torch.testing.assert_close(out, together[rows], rtol=1e-5, atol=1e-6)


def test_an_unknown_backend_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"paged_magic.*torch_native"):
        make_backend("paged_magic", CPU, torch.float32, 64)
