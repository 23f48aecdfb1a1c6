"""The stages with a model that has a chat template: what is stored and asked is what the template makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.pipeline.stages import MODEL, Stages, demo_samples
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.pipeline import run_pipeline as module
from vllm_blend.pipeline.config import DecodeConfig, PrefillConfig, RetrievalConfig
from vllm_blend.pipeline.datasets import normalize_sample
from vllm_blend.pipeline.files import write_json
from vllm_blend.pipeline.speculative_decode import report

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}\nassistant:{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The demo model with a chat template."""
    folder = tmp_path_factory.mktemp("chat")
    for path in Path(MODEL).iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def test_questions_are_asked_by_the_chat_template(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    add_request = LLMEngine.add_request

    def record(engine: LLMEngine, request_id: str, prompt: Any, *arguments: Any, **options: Any) -> None:
        asked.append(engine.identify_chunks(prompt["prefix"], [*prompt["chunks"], prompt["suffix"]]))
        add_request(engine, request_id, prompt, *arguments, **options)

    monkeypatch.setattr(LLMEngine, "add_request", record)
    samples = demo_samples(1)
    stages = Stages.over(tmp_path, samples)
    built = stages.build(model_id=model, dtype="bfloat16")
    trace = stages.decode(model_id=model, dtype="bfloat16", passages="all")
    assert built["asked_by"] == trace["asked_by"] == "chat template"
    assert "1 questions (0 failed), asked by chat template" in report(trace, DecodeConfig())
    assert trace["summary"]["chunks"]["loaded"] == built["summary"]["chunks"]
    [(prefix, chunks)] = asked
    view = normalize_sample(samples[0])
    passages = "".join(f"{p.title}\n{p.text}\n\n" if p.title else f"{p.text}\n\n" for p in view.passages)
    message = (
        f"Answer the question with a short phrase copied from the passages.\n\n{passages}"
        f"Question: {view.question}\nAnswer with a short phrase from the passages."
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
    )
    ids = [*prefix.token_ids, *(token for chunk in chunks for token in chunk.token_ids)]
    assert tokenizer.decode(ids) == text
    keys = torch.load(next(stages.chunks.glob("*chunk0")) / "keys.pt", weights_only=True)
    assert keys.dtype == torch.bfloat16  # as the model computes it


def test_a_style_asks_in_its_words(model: str, tmp_path: Path) -> None:
    data = str(write_json(tmp_path / "musique_t.json", demo_samples(1)))
    retrieval = RetrievalConfig(
        dataset_name="musique_t",
        dataset_path=data,
        dataset_style="by-name",
        output_dir=str(tmp_path / "retrieval"),
    )
    common: dict[str, Any] = {"model_id": model, "dtype": "float32"}
    chunks = str(tmp_path / "kv")
    decode = DecodeConfig(**common, load_cache_dir=chunks, output=str(tmp_path / "trace.json"))
    outputs = module.run_pipeline(retrieval, PrefillConfig(**common, output_dir=chunks), decode)
    assert outputs["prefill"]["asked_by"] == outputs["decode"]["asked_by"] == "style musique"
    assert outputs["decode"]["summary"]["chunks"]["loaded"] == outputs["prefill"]["summary"]["chunks"]


def test_a_data_set_without_a_style_is_refused_before_any_stage_only_without_a_template(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    def begin(config: RetrievalConfig) -> dict[str, Any]:
        begun.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_retrieval", begin)
    retrieval = RetrievalConfig(dataset_name="mine", output_dir=str(tmp_path))
    with pytest.raises(ValueError, match="cannot tell how to ask data set 'mine'"):
        module.run_pipeline(retrieval, PrefillConfig(), DecodeConfig())
    assert not begun
    with pytest.raises(KeyboardInterrupt):
        module.run_pipeline(retrieval, PrefillConfig(model_id=model), DecodeConfig(model_id=model))
    assert len(begun) == 1
