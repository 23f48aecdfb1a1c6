"""The question's pass as a graph measures what the same pass measures launch by launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_blend import LLM, SamplingParams
from vllm_blend.worker import blend_runner
from vllm_blend.worker.question_graphs import ROWS, QuestionGraphs

pytestmark = pytest.mark.gpu

MODEL = "inputs/demo-model"
ROOM: dict[str, Any] = {"num_gpu_blocks_override": 4096, "max_num_seqs": 4, "blend_chunk_cache_gib": 0.5}
GREEDY = SamplingParams(temperature=0, max_tokens=8)


RULES = [f"question_attention{settings}" for settings in ("", "(layer_share=1, first_layer=0)", "(first_layer=0.25)")]


@pytest.fixture(scope="module", params=RULES)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    yield LLM(MODEL, device="cuda", dtype="bfloat16", enable_blending=True, blend_selector=request.param, **ROOM)
    torch.cuda.empty_cache()


def prompt(suffix: int, chunk: int = 40) -> Any:
    chunks = [[(7 * i + 3 * j) % 900 + 20 for i in range(chunk)] for j in range(6)]
    return {"prefix": [5, 6, 7], "chunks": chunks, "suffix": [(11 * i) % 700 + 30 for i in range(suffix)]}


@pytest.mark.parametrize("suffix", [1, 5, 31, 32, 33, 100, 128])
def test_same_mass_as_without_a_graph(llm: LLM, suffix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masses are the same even after longer contexts and with fewer rows than before: a replay leaves nothing over."""
    compared = []
    replay = QuestionGraphs.run

    def both(self: QuestionGraphs, request: Any, look: Any, positions: Any, num_suffix: int) -> torch.Tensor | None:
        [eager] = blend_runner.question_mass([request], self.parts)
        mass = replay(self, request, look, positions, num_suffix)
        assert mass is not None
        compared.append((mass.clone(), eager))
        return mass

    monkeypatch.setattr(QuestionGraphs, "run", both)
    for chunk in (70, 40):
        llm.generate([prompt(suffix, chunk)], GREEDY, use_tqdm=False)
    assert len(compared) == 2
    for mass, eager in compared:
        n = len(eager)
        assert (mass[n:] == 0).all()
        torch.testing.assert_close(mass[:n].sum().item(), float(suffix), rtol=2e-2, atol=0)
        # The rows of a bucket change the shapes of the products, and with them the rounding of bf16.
        assert (mass[:n] - eager).abs().max() <= 0.05 * eager.max()


def test_a_question_too_long_for_a_graph_is_answered(llm: LLM) -> None:
    [output] = llm.generate([prompt(ROWS[0] + 1)], GREEDY, use_tqdm=False)
    assert output.error is None and output.blend is not None and output.blend.num_recomputed_tokens > ROWS[0]
