"""Two processes that train one model take the steps of a single one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.engines import ROOT, tiny_model
from vllm_blend.finetune.command import main
from vllm_blend.finetune.replicas import Replicas, joined
from vllm_blend.finetune.run import _check_rows

pytestmark = pytest.mark.cpu_only

SAMPLES = [
    {"ctxs": [{"title": "", "text": "a b"}, {"title": "", "text": "c"}], "question": "who", "answers": [answer]}
    for answer in ("x", "y")
]
# In full, so that no mask is drawn; with one sample for each process, so that its gradients alone would go elsewhere.
OPTIONS = ["--steps", "3", "--log-steps", "1", "--full", "1", "--isolated", "0", "--batch-size", "2", "--device", "cpu"]
OPTIONS += ["--learning-rate", "0.01", "--warmup-steps", "1"]


def test_two_processes_train_as_one_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, model = tmp_path / "musique_tiny.json", tiny_model("qwen3", max_position_embeddings=512)
    data.write_text(json.dumps(SAMPLES))
    folders = [tmp_path / "one", tmp_path / "two"]
    commands = [[model, "--output", str(folder), "--dataset", str(data), *OPTIONS] for folder in folders]
    assert main(commands[0]) == 0
    alone = _losses(capsys.readouterr().out)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "-m", "vllm_blend.finetune.command", *commands[1]],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert _losses(done.stdout) == pytest.approx(alone, abs=2e-3)  # said once, by rank 0
    before, one, two = (_weights(folder) for folder in (Path(model), *folders))
    assert (two - one).norm() < 0.02 * (one - before).norm()


def test_a_batch_that_cannot_be_shared_out_is_refused() -> None:
    assert Replicas(1, 2).share_of("--batch-size", 6) == 3
    with pytest.raises(ValueError, match="--batch-size 5 must be a multiple of the 2 processes"):
        Replicas(0, 2).share_of("--batch-size", 5)


def test_a_batch_has_room_for_the_longest_rows_of_each_process() -> None:
    _check_rows(8, [512, 4096], Replicas(0, 2))
    with pytest.raises(ValueError, match=r"--batch-size 14 has too few tokens for rows of 4096 .* use 16 or more"):
        _check_rows(7, [512, 4096], Replicas(0, 2))


@pytest.mark.parametrize(("size", "fault"), [("", "WORLD_SIZE is ''"), ("2", "LOCAL_RANK is not set")])
def test_variables_of_another_launcher_are_refused(size: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ValueError, match=fault), joined(torch.device("cpu")):
        pass


def _weights(folder: Path) -> torch.Tensor:
    tensors = load_file(folder / "model.safetensors")
    return torch.cat([tensors[name].flatten().float() for name in sorted(tensors)])


def _losses(text: str) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in text.splitlines() if line.startswith("step")]
