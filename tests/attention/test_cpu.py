from __future__ import annotations

import pytest
import torch

from tests.ops.paged import Problem, assert_near, build
from vllm_blend.attention.cpu import CPUBackend
from vllm_blend.attention.metadata import AttentionMetadata, LayerStep
from vllm_blend.ops import bindings
from vllm_blend.ops.attention import attention_mass_reference, paged_attention_reference
from vllm_blend.ops.paged_kv import PagedKV


def step_of(problem: Problem) -> LayerStep:
    metadata = AttentionMetadata(
        problem.positions,
        torch.zeros_like(problem.positions),
        problem.block_tables,
        problem.query_start_loc.tolist(),
        problem.seq_lens.tolist(),
    )
    kv = PagedKV(problem.key_cache, problem.value_cache)
    return LayerStep(problem.q, kv, metadata, problem.scale, problem.window)


def test_mixed_steps_one_after_the_other() -> None:
    """Every step brings its own metadata: nothing of the step before may stay behind."""
    backend = CPUBackend()
    for seed, (lengths, queries) in enumerate([([50, 40], [20, 1]), ([60], [1]), ([50, 40], [1, 1]), ([30], [30])]):
        problem = build(lengths, queries, 6, 2, 64, torch.float32, seed=seed)
        expected = paged_attention_reference(*problem.arguments(torch.float64))
        step = step_of(problem)
        for _ in range(2):  # two layers
            assert_near(backend.attend(step), expected, torch.float32)


def test_narrowed_step() -> None:
    """Between two layers of a blend the token set shrinks; the keys stay."""
    backend = CPUBackend()
    problem = build([80, 60], [40, 1], 6, 2, 64, torch.float32)
    step = step_of(problem)
    whole = backend.attend(step)
    rows = torch.tensor([0, 7, 8, 39, 40])
    narrowed = step.part(rows, step.metadata.narrow(rows, [0, 4, 5]))
    assert_near(backend.attend(narrowed), whole[rows], torch.float32)


def test_sliding_window_and_attention_mass() -> None:
    backend = CPUBackend()
    problem = build([80, 60, 20], [40, 1, 0], 6, 2, 64, torch.bfloat16, window=23)
    step = step_of(problem)
    rows = [slice(30, 40), slice(40, 41), slice(41, 41)]
    masses = backend.attention_mass(step, rows)
    expected = attention_mass_reference(*problem.mass_arguments(torch.float64, rows))
    for mass, wanted in zip(masses, expected, strict=True):
        assert_near(mass, wanted, torch.float32, slack=2.0)
    out = backend.attend(step)
    assert_near(out, paged_attention_reference(*problem.arguments(torch.float64)), torch.bfloat16, slack=3.0)


def test_without_kernels_construction_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bindings.DISABLE_VARIABLE, "1")
    bindings.reload()
    try:
        with pytest.raises(ImportError, match=bindings.DISABLE_VARIABLE):
            CPUBackend()
    finally:
        monkeypatch.undo()
        bindings.reload()
