"""What became of the time of a call on a GPU, counted from its kernels."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu_account import KINDS, Kernel, account, kind_of
from benchmarks.gpu_timeline import measure_mix, measure_steps, row
from tests.engine.engines import new_llm, tiny_model

pytestmark = pytest.mark.cpu_only


def test_an_account_by_hand() -> None:
    kernels = [
        Kernel("nvjet_tst_128x64", 2.0, 5.0),
        Kernel("void prefill_wgmma_kernel<128>", 4.0, 6.0),  # at the same time as the product, in part
        Kernel("Memcpy HtoD (Pinned -> Device)", 8.0, 8.5),
    ]
    found = account(kernels, 10.0)
    assert (found.first, found.busy, found.idle, found.last, found.num_kernels) == (2.0, 4.5, 2.0, 1.5, 3)
    assert found.kinds == dict.fromkeys([kind for kind, _ in KINDS], 0.0) | {
        "products": 3.0,
        "attention": 2.0,
        "placing": 0.5,
    }
    assert found.gaps == [(2.0, 6.0, "Memcpy HtoD (Pinned -> Device)")]
    assert row("it", [9.0], [7.0], []) == "| it | 9.00 | 7.00 |" + "  |" * 11
    assert row("it", [9.0], [7.0], [found]).startswith(
        "| it | 9.00 | 7.00 | 10.00 | 2.00 | 4.50 | 2.00 | 1.50 | 3 | 2.00 | 3.00 |"
    )


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=20),
    st.integers(0, 20),
)
def test_all_of_the_time_is_accounted_for(lengths: list[tuple[int, int]], more: int) -> None:
    kernels = [Kernel("kernel", float(start), float(start + length)) for start, length in lengths]
    wall = max(kernel.stop for kernel in kernels) + more
    found = account(kernels, wall)
    assert found.first + found.busy + found.idle + found.last == wall
    covered = {at for start, length in lengths for at in range(start, start + length)}
    assert found.busy == len(covered)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "products"),
        ("void vllm_blend::rms_norm_kernel<__nv_bfloat16>", "norms, RoPE and SwiGLU"),
        ("decode_plan_kernel", "attention"),
        ("place_chunk_kernel", "placing"),
        ("at::native::index_elementwise_kernel", "others"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_call_without_kernels_is_an_error() -> None:
    with pytest.raises(ValueError, match="ran no kernel"):
        account([], 1.0)


def test_steps_are_of_requests_that_all_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples: dict[str, dict[str, Any]] = {}
    args = Namespace(repeats=2, without_profiler=True, output=tmp_path / "timeline.json")
    with new_llm(tiny_model("llama", max_position_embeddings=512), enable_blending=False) as llm:
        measure_steps(llm, "3 at 20", 3, 20, 0.6, args, samples)
        assert not llm.llm_engine.has_unfinished_requests()
    assert len(samples["32 steps of 3 at 20"]["wall_ms"]) == 2
    assert "| 32 steps of 3 at 20 | " in capsys.readouterr().out
    assert args.output.exists()


def test_a_mix_comes_at_once_and_ends_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    samples: dict[str, dict[str, Any]] = {}
    work = {"requests": 3, "tokens_in": [5, 30], "tokens_out": [2, 9], "temperature": 0.6}
    with new_llm(tiny_model("llama", max_position_embeddings=128), enable_blending=False) as llm:
        measure_mix(llm, work, Namespace(repeats=2, without_profiler=True, output=None), samples)
        assert not llm.llm_engine.has_unfinished_requests()
    [(name, measured)] = samples.items()
    assert name.startswith("a mix of 3, ")
    assert len(measured["wall_ms"]) == 2
    assert f"| {name} | " in capsys.readouterr().out


def test_requests_that_leave_the_batch_are_an_error() -> None:
    args = Namespace(repeats=2, without_profiler=True, output=None)
    llm = new_llm(tiny_model("llama", max_position_embeddings=128), enable_blending=False)
    with llm, pytest.raises(RuntimeError, match="3 requests did not stay in the batch"):
        measure_steps(llm, "3 at 20", 3, 20, 0.6, args, {})
