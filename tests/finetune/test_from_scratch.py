"""`scripts/train/from_scratch.py`: a model of any size with its own tokenizer, which loads as the demo model does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.engine.engines import DEMO, ROOT, engine, greedy, run

pytestmark = pytest.mark.cpu_only

SIZE = {"--layers": 1, "--hidden": 64, "--heads": 2, "--kv-heads": 1, "--mlp": 64, "--vocabulary": 600}


def from_scratch(output: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    given = SIZE | {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    command = [sys.executable, str(ROOT / "scripts/train/from_scratch.py"), "--output", str(output)]
    return subprocess.run([*command, *(str(x) for pair in given.items() for x in pair)], capture_output=True, text=True)


@pytest.mark.slow
def test_a_step_of_training_writes_a_model_that_loads(tmp_path: Path) -> None:
    output = tmp_path / "model"
    done = from_scratch(output, steps=1, batch_size=1, prompts=2, workers=0)
    assert done.returncode == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained(output)
    config = model.config
    assert (config.num_hidden_layers, config.vocab_size, config.rope_parameters["rope_theta"]) == (1, 600, 1e4)
    assert model.dtype == torch.bfloat16 and config.tie_word_embeddings
    ours, shipped = AutoTokenizer.from_pretrained(output), AutoTokenizer.from_pretrained(DEMO)
    text = "Question: Where was Blai Strox born in 1873?\nAnswer:"
    ids = ours.encode(text)
    assert ids[0] == shipped.encode(text)[0] == 0 and ours.decode(ids[1:]) == text and len(ours) == 600
    with engine(str(output)) as llm:
        [answer] = run(llm, text, greedy(2, ignore_eos=True))
    assert answer.prompt_token_ids == ids and len(answer.outputs[0].token_ids) == 2


@pytest.mark.slow
def test_bad_options_are_refused(tmp_path: Path) -> None:
    done = from_scratch(tmp_path / "model", kv_heads=3)
    assert done.returncode == 2 and "--heads 2 must be a multiple of --kv-heads 3" in done.stderr
    (tmp_path / "mine").write_text("mine")
    done = from_scratch(tmp_path, steps=1)
    assert done.returncode == 2 and "is not an empty folder" in done.stderr
