"""`scripts/train/train.py`: a model of any size with its own tokenizer, which loads as the demo model does."""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.engines import DEMO, ROOT, engine, greedy, run
from vllm_blend.finetune.state import STATE_FILE

pytestmark = pytest.mark.cpu_only

SIZE = {"layers": 1, "hidden": 64, "heads": 2, "kv_heads": 1, "mlp": 64, "vocabulary": 600}
ONE_STEP = {"steps": 1, "batch_size": 1, "prompts": 1, "workers": 0, "development_rows": 1, "device": "cpu"}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "scripts/train/train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        spec.loader.exec_module(module)
    module.train_tokenizer = partial(module.train_tokenizer, worlds=100)  # type: ignore[attr-defined]
    return module


@pytest.fixture(scope="module")
def first(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new model after a step."""
    output = tmp_path_factory.mktemp("first") / "model"
    assert train(script, output, **SIZE, **ONE_STEP) == 0
    return output


def train(script: ModuleType, output: Path, *flags: str, **options: Any) -> int:
    pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in options.items()]
    status: int = script.main(["--output", str(output), *flags, *(text for pair in pairs for text in pair)])
    return status


def test_a_step_of_training_writes_a_model_that_loads(first: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(first)
    config = model.config
    assert (config.num_hidden_layers, config.vocab_size, config.rope_parameters["rope_theta"]) == (1, 600, 1e4)
    assert model.dtype == torch.bfloat16 and config.tie_word_embeddings
    ours, shipped = AutoTokenizer.from_pretrained(first), AutoTokenizer.from_pretrained(DEMO)
    text = "Question: Where was Blai Strox born in 1873?\nAnswer:"
    ids = ours.encode(text)
    assert ids[0] == shipped.encode(text)[0] == 0 and ours.decode(ids[1:]) == text and len(ours) == 600
    with engine(str(first)) as llm:
        [answer] = run(llm, text, greedy(2, ignore_eos=True))
    assert answer.prompt_token_ids == ids and len(answer.outputs[0].token_ids) == 2


def test_a_model_goes_on_with_longer_rows_and_a_paused_run_with_resume(
    script: ModuleType, first: Path, tmp_path: Path
) -> None:
    second, lengths = tmp_path / "second", ["--lengths", "1024", "1536"]
    longer = {**ONE_STEP, "prompts": 300, "steps": 3, "from": first, "positions": 4096}
    assert train(script, second, *lengths, **longer, pause_minutes=1e-9) == 0
    assert (second / STATE_FILE).exists()
    assert train(script, second, *lengths, "--resume", **longer) == 0
    assert not (second / STATE_FILE).exists()
    assert AutoModelForCausalLM.from_pretrained(second).config.max_position_embeddings == 4096
    assert AutoTokenizer.from_pretrained(second).model_max_length == 4096


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kv_heads": 4}, "--heads 6 must be a multiple of --kv-heads 4"),
        ({"from": DEMO, "layers": 2}, "--layers is for training from scratch"),
        ({"mlp": 0}, "--mlp must be positive, not 0"),
    ],
)
def test_bad_shapes_are_refused(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        train(script, tmp_path / "model", **options)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_bad_options_are_refused_before_work(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    assert train(script, tmp_path, **ONE_STEP) == 2
    assert "is not an empty folder" in capsys.readouterr().err
    assert train(script, tmp_path / "new", "--positions", "512", **ONE_STEP) == 2
    assert "--positions 512 is less than the longest rows, 1024" in capsys.readouterr().err
    assert train(script, tmp_path / "new", "--resume", **ONE_STEP) == 2
    assert "has no training_state.pt" in capsys.readouterr().err
