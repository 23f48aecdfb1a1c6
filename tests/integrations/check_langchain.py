"""LangChain's `VLLM` of langchain-community."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from langchain_community.llms import VLLM

from tests.integrations.hugging_face import MAX_TOKENS, MODEL, PROMPTS, greedy


@pytest.fixture(scope="module")
def llm() -> VLLM:
    return VLLM(model=MODEL, max_new_tokens=MAX_TOKENS, temperature=0.0, vllm_kwargs={"max_model_len": 256})


def test_texts_are_those_of_hugging_face(llm: VLLM) -> None:
    expected = [greedy(prompt) for prompt in PROMPTS]
    assert [llm.invoke(prompt) for prompt in PROMPTS] == llm.batch(PROMPTS) == expected
    assert ["".join(llm.stream(prompt)) for prompt in PROMPTS] == expected
    stop = expected[0].strip().split()[-1]
    assert llm.invoke(PROMPTS[0], stop=[stop]) == expected[0].partition(stop)[0]


def test_what_the_engine_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="enable_lora=True is not supported: merge the LoRA adapter"):
        VLLM(model=MODEL, vllm_kwargs={"enable_lora": True})
    with pytest.raises(ValueError, match="tensor_parallel_size=0"):
        VLLM(model=MODEL, tensor_parallel_size=0)


def test_the_block_of_the_page_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "integrations.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(root)
    exec(compile(code, "docs/integrations.md", "exec"), {})
