"""Hybrids: which rows go where, and that the whole is the contract."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.attention.test_contract import Step, check, make_step
from vllm_blend.attention.hybrid import HybridBackend
from vllm_blend.attention.metadata import AttentionMetadata
from vllm_blend.attention.torch_native import TorchNativeBackend


class Recording(TorchNativeBackend):
    """Plain torch that remembers what it was given, and like some backends plans once a step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.attended: list[AttentionMetadata] = []
        self.measured = 0

    def attend(self, q: torch.Tensor, cache: Any, metadata: AttentionMetadata, *rest: Any) -> torch.Tensor:
        self.attended.append(metadata)
        assert len(q) == metadata.num_tokens
        return super().attend(q, cache, metadata, *rest)

    def attention_mass(self, *arguments: Any) -> list[torch.Tensor]:
        self.measured += 1
        return super().attention_mass(*arguments)


@pytest.fixture
def parts() -> list[Recording]:
    return [Recording(name) for name in ("dense", "scattered", "decode", "mass")]


def mixed() -> Step:
    positions = [[3], list(range(20)), [1, 4, 9], [29], list(range(10, 25)), [0, 2]]
    step = make_step([9, 20, 12, 30, 25, 3], positions, 2, 2, 16, 8, None, seed=3)
    return replace(step, metadata=replace(step.metadata, at_end=(False, True, False, True, True, False)))


def lengths(backend: Recording) -> list[list[int]]:
    return [metadata.seq_lens for metadata in backend.attended]


def test_requests_go_to_the_backend_of_their_job(parts: list[Recording]) -> None:
    check(HybridBackend(*parts), mixed())
    dense, scattered, decode, mass = parts
    assert lengths(dense) == [[20, 25]] and lengths(scattered) == [[12, 3]] and lengths(decode) == [[9, 30]]
    assert dense.attended[0].at_end == (True, True)
    assert mass.measured == 1 and not any(part.measured for part in (dense, scattered, decode))


def test_a_backend_of_two_jobs_gets_one_step(parts: list[Recording]) -> None:
    dense, scattered, _, mass = parts
    check(HybridBackend(dense, scattered, dense, mass), mixed())
    assert lengths(dense) == [[9, 20, 30, 25]] and lengths(scattered) == [[12, 3]]


def test_layers_share_the_parts_of_a_step(parts: list[Recording]) -> None:
    step, hybrid = mixed(), HybridBackend(*parts)
    for _ in range(2):
        hybrid.attend(step.q, step.cache, step.metadata, step.scale)
    first, second = parts[1].attended
    assert first is second
    hybrid.attend(step.q, step.cache, replace(step.metadata), step.scale)
    assert parts[1].attended[2] is not first


def test_one_kind_of_work_goes_on_as_it_is(parts: list[Recording]) -> None:
    step = make_step([9, 20], [[8], [19]], 2, 2, 16, 8, None, seed=4)
    HybridBackend(*parts).attend(step.q, step.cache, step.metadata, step.scale)
    assert parts[2].attended == [step.metadata] and not parts[0].attended and not parts[1].attended


def test_a_step_without_rows(parts: list[Recording]) -> None:
    """As the last layer of a pass of which nothing is wanted."""
    step = make_step([9, 20], [[], []], 2, 2, 16, 8, None, seed=4)
    out = HybridBackend(*parts).attend(step.q, step.cache, step.metadata, step.scale)
    assert out.shape == step.q.shape and not any(part.attended for part in parts)


def test_unknown_positions_are_scattered(parts: list[Recording]) -> None:
    step = make_step([20], [list(range(20))], 2, 2, 16, 8, None, seed=5)
    HybridBackend(*parts).attend(step.q, step.cache, step.metadata, step.scale)
    assert lengths(parts[1]) == [[20]]


def test_what_measures_attention_also_attends(parts: list[Recording]) -> None:
    """A backend may have computed the output while it measured."""
    step, hybrid = mixed(), HybridBackend(*parts)
    rows = [step.metadata.rows(r) for r in range(step.metadata.num_requests)]
    masses = [torch.zeros(2, n) for n in step.metadata.seq_lens]
    hybrid.add_attention_mass(masses, step.q, step.cache, step.metadata, step.scale, rows)
    expected = TorchNativeBackend().attention_mass(step.q, step.cache, step.metadata, step.scale, rows)
    for mass, wanted in zip(masses, expected, strict=True):
        torch.testing.assert_close(mass.sum(0), wanted)
    hybrid.attend(step.q, step.cache, step.metadata, step.scale)
    assert len(parts[3].attended) == 1 and not parts[1].attended
    hybrid.attend(step.q.clone(), step.cache, step.metadata, step.scale)
    assert len(parts[3].attended) == 1 and parts[1].attended


def test_capturable_is_what_decodes(parts: list[Recording]) -> None:
    parts[2].capturable_decode = True
    assert HybridBackend(*parts).capturable_decode
    assert not HybridBackend(parts[2], parts[2], parts[0], parts[2]).capturable_decode
