"""The question's pass that is replayed from buffers gives what the same pass gives when it is launched anew, for the
engine's own rule and for those that a prompt asks for. See test_step_graphs.py for what a replay is here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.blend.prompts import tiny_prompt
from tests.engine.engines import greedy, new_llm, run, tiny_model
from tests.worker.test_step_graphs import FollowsTheDevice, block_pass_of, run_again
from vllm_blend.attention.metadata import LayerStep
from vllm_blend.blend.selectors import Look
from vllm_blend.worker import blend_runner
from vllm_blend.worker.device_parts import DeviceParts
from vllm_blend.worker.question_graphs import QuestionGraphs, looks_to_capture

TINY = tiny_model("llama")
EARLY = "question_attention(first_layer=0)"


class MeasuresRows(FollowsTheDevice):
    """Measures the mass row by row, so that rows can be ignored wherever they are."""

    capturable_mass = True

    def add_attention_mass(
        self,
        masses: list[torch.Tensor],
        step: LayerStep,
        query_rows: list[slice],
        ignored: torch.Tensor | None = None,
    ) -> None:
        assert ignored is not None
        rows = range(query_rows[0].start, query_rows[0].stop)
        for row in (row for row in rows if not ignored[row]):
            length = int(step.metadata.positions[row]) + 1
            one = step.metadata.narrow(torch.tensor([row]), [0, 1, 1])
            object.__setattr__(one, "seq_lens", [length, 0])
            alone = step._replace(q=step.q[row : row + 1], metadata=one)
            [mass, _] = self.attention_mass(alone, [slice(0, 1), slice(1, 1)])
            masses[0][0, :length] += mass[:length]


@pytest.mark.parametrize("rule", ["question_attention", EARLY, "first_tokens"])
def test_a_prompts_own_rule_is_replayed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = new_llm(TINY, enable_blending=True, blend_selector=rule, attention_backend="torch_native")
    block_pass = block_pass_of(llm)
    cached = block_pass.parts
    parts = DeviceParts(cached.model, cached.cache, MeasuresRows(), cached.heads)
    num_layers = len(cached.cache.layers)
    with torch.inference_mode():
        graphs = QuestionGraphs(parts, llm.llm_engine.max_model_len, looks_to_capture(rule, num_layers), run_again)
    monkeypatch.setattr(block_pass, "question_graphs", graphs)
    replay, seen = graphs.run, list[bool]()

    def both(request: Any, look: Look, positions: Any, num_suffix: int) -> torch.Tensor | None:
        [expected] = blend_runner.question_mass([request], cached)
        mass = replay(request, look, positions, num_suffix)
        seen.append(mass is not None)
        if mass is not None:
            torch.testing.assert_close(mass[: len(expected)], expected, rtol=1e-4, atol=1e-6)
            assert not mass[len(expected) :].any()
        return mass

    monkeypatch.setattr(graphs, "run", both)
    for asked in (rule, "question_attention", "question_attention(layer_share=0.6, mean_shift=0)"):
        for prompt in (tiny_prompt(), tiny_prompt(suffix=[5, 9, 3])):
            [output] = run(llm, [prompt | {"blend_selector": asked}], greedy(2))
            assert output.error is None
    assert seen == [True] * (2 if rule == "first_tokens" else 4) + [False] * 2  # a share of its own is launched


def test_what_is_captured() -> None:
    """Looks that differ, each once."""
    usual = [Look(6, 4)]
    for rule in ("question_attention", "auto", "question_attention(mean_shift=0)", "first_tokens"):
        assert looks_to_capture(rule, 8) == usual
    assert looks_to_capture("question_attention(layer_share=1)", 8) == [Look(8, 4), *usual]
