"""Every attention backend that is installed, on a GPU: the contract against float64, and what 'auto' makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec

import pytest
import torch

from tests.attention.test_contract import Step, dense, make_step, rows_half
from vllm_blend.attention.metadata import AttentionBackend, AttentionMetadata
from vllm_blend.attention.registry import KINDS, first_usable, make_backend, make_usable
from vllm_blend.attention.self_check import HeadLayout
from vllm_blend.ops.paged_kv import PagedKV

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
# Of a row, relative to its norm. Probabilities are rounded to the dtype before they meet the values.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}
CASES = [
    ("cuda", torch.bfloat16, 128),
    ("cuda", torch.float16, 64),
    ("flashinfer", torch.bfloat16, 128),
    ("flashinfer", torch.bfloat16, 64),
    ("flashinfer", torch.float16, 128),
    ("xformers", torch.bfloat16, 128),
    ("xformers", torch.float16, 64),
    ("torch_native", torch.bfloat16, 128),
    ("torch_native", torch.float16, 80),
    ("torch_native", torch.float32, 64),
]


@dataclass(frozen=True)
class Case:
    backend: AttentionBackend
    dtype: torch.dtype
    head_dim: int


def where_installed(name: str, dtype: torch.dtype, head_dim: int) -> object:
    package = KINDS[name].package
    missing = package is not None and find_spec(package) is None
    mark = pytest.mark.skipif(missing, reason=f"{package} is not installed")
    return pytest.param((name, dtype, head_dim), marks=mark, id=f"{name}-{str(dtype)[6:]}-{head_dim}")


@pytest.fixture(scope="module", params=[where_installed(*case) for case in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    name, dtype, head_dim = request.param
    return Case(make_usable(name, HeadLayout(GPU, dtype, 8, 2, head_dim)), dtype, head_dim)


def on_gpu(step: Step, dtype: torch.dtype) -> tuple[Step, Step]:
    """The step rounded to `dtype`, on the host for the reference and on the GPU."""
    keys, values = ([t.to(dtype) for t in tensors] for tensors in (step.keys, step.values))
    rounded = replace(step, q=step.q.to(dtype), keys=keys, values=values)
    cache = PagedKV(step.cache.key.to(GPU, dtype), step.cache.value.to(GPU, dtype))
    m = step.metadata
    tables = m.block_tables.to(GPU)
    metadata = AttentionMetadata(
        m.positions.to(GPU), m.slot_mapping.to(GPU), tables, m.query_start_loc, m.seq_lens, m.at_end
    )
    return rounded, replace(rounded, q=rounded.q.to(GPU), cache=cache, metadata=metadata)


def check(backend: AttentionBackend, step: Step, dtype: torch.dtype) -> None:
    host, device = on_gpu(step, dtype)
    halves = [rows_half(host.metadata.rows(r)) for r in range(host.metadata.num_requests)]
    out = backend.attend(device.layer).double().cpu()
    masses = backend.attention_mass(device.layer, halves)
    for request in range(host.metadata.num_requests):
        rows, half = host.metadata.rows(request), halves[request]
        probabilities, expected = dense(host, request)
        if rows.stop > rows.start:
            worst = ((out[rows] - expected).flatten(1).norm(dim=1) / expected.flatten(1).norm(dim=1)).max()
            assert worst <= TOLERANCE[dtype]
        mass = probabilities[:, half.start - rows.start : half.stop - rows.start].sum(1).mean(0)
        assert (masses[request].double().cpu() - mass).norm() <= TOLERANCE[dtype] * mass.norm()


MIXED = (
    [300, 70, 33, 290, 17, 40],
    [
        sorted({*range(0, 300, 3), *range(90, 130), 299}),
        list(range(70)),
        [32],
        list(range(120, 290)),
        [],
        [3, 39],
    ],
)


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_step_of_everything(case: Case, group: int, block_size: int) -> None:
    check(case.backend, make_step(*MIXED, 2, group, case.head_dim, block_size, None, seed=1), case.dtype)


def test_a_long_run_among_scattered_rows(case: Case) -> None:
    positions = [[1, 5, *range(30, 200), 210, 239], [*range(0, 160), 180]]
    check(case.backend, make_step([240, 181], positions, 2, 4, case.head_dim, 16, None, seed=2), case.dtype)


def test_decodes_of_unequal_length(case: Case) -> None:
    lengths = [1, 2, 15, 16, 17, 33, 100, 257]
    positions = [[n - 1] for n in lengths]
    check(case.backend, make_step(lengths, positions, 2, 4, case.head_dim, 16, None, seed=3), case.dtype)
    positions[6] = [41]  # a single row need not be the last
    check(case.backend, make_step(lengths, positions, 2, 4, case.head_dim, 16, None, seed=3), case.dtype)


@pytest.mark.parametrize("window", [5, 64])
def test_sliding_windows(case: Case, window: int) -> None:
    check(case.backend, make_step(*MIXED, 2, 4, case.head_dim, 16, window, seed=4), case.dtype)


def test_rows_that_are_known_to_be_last(case: Case) -> None:
    lengths, positions = [90, 40, 260], [list(range(50, 90)), [39], list(range(260))]
    step = make_step(lengths, positions, 2, 4, case.head_dim, 16, None, seed=5)
    known = replace(step, metadata=replace(step.metadata, at_end=(True, True, True)))
    check(case.backend, known, case.dtype)


def test_auto_takes_our_kernels() -> None:
    first_usable.cache_clear()
    assert first_usable(HeadLayout(GPU, torch.bfloat16, 8, 2, 128)) == "cuda"
    backend = make_backend("auto", GPU, torch.bfloat16, 128, 8, 2, decode_graphs=True)
    assert backend.capturable_decode
    check(backend, make_step(*MIXED, 2, 4, 128, 16, None, seed=6), torch.bfloat16)


def test_auto_takes_plain_torch_for_float32() -> None:
    assert make_backend("auto", GPU, torch.float32, 64).name == "torch_native"
