"""The training script of the demo model: the same network as Hugging Face's, and a model directory that loads."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "inputs/demo-model"


@pytest.fixture(scope="module")
def training_model() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo_training_model", ROOT / "scripts/train/model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_training_model_computes_what_transformers_computes(training_model: ModuleType) -> None:
    reference = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    model = training_model.DemoModel(training_model.ModelConfig())
    weights = load_file(DEMO_MODEL / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): w.float() for name, w in weights.items()})
    ids = torch.arange(64)[None] * 31 % 2048
    with torch.no_grad():
        assert torch.allclose(model(ids), reference(ids).logits, atol=1e-4)


@pytest.mark.slow
def test_two_steps_of_training_write_a_model_that_loads(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/train/train.py"), "--output-dir", str(tmp_path / "model")]
    options = {"--contexts": 4, "--batch-size": 1, "--max-steps": 2, "--minutes": 5}
    subprocess.run([*command, *(str(x) for pair in options.items() for x in pair)], check=True, cwd=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    shipped = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in shipped.named_parameters()}
    assert AutoTokenizer.from_pretrained(tmp_path / "model").encode("a")[0] == 0


def test_a_bad_option_is_refused_by_name() -> None:
    command = [sys.executable, str(ROOT / "scripts/train/train.py"), "--output-dir", "unused", "--contexts", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--contexts must be positive" in done.stderr
