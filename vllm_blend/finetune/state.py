"""Checkpoints of a training run, from which a later process goes on: what is trained, the optimizer, and the time."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_blend.finetune.plan import TrainingPlan
from vllm_blend.finetune.saving import check_output

STATE_FILE = "training_state.pt"
FREE_TO_CHANGE = ("pause_minutes", "save_minutes", "log_steps", "compile", "accumulate", "checkpoint_activations")


@dataclass(frozen=True)
class TrainingState:
    """The state after `step` steps and `seconds` of training. `trained` are the trained parameters by name, in the
    dtype in which they are trained; `rows` is how many rows have arrived."""

    step: int
    seconds: float
    rows: int
    plan: TrainingPlan
    trained: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


def save_state(state: TrainingState, output: Path) -> None:
    """Write a checkpoint into the folder; an earlier one is replaced as a whole."""
    output.mkdir(parents=True, exist_ok=True)
    content = {name: getattr(state, name) for name in ("step", "seconds", "rows", "trained", "optimizer")}
    temporary = output / f".{STATE_FILE}"
    torch.save({**content, "plan": asdict(state.plan)}, temporary)
    os.replace(temporary, output / STATE_FILE)


def _check_resumable(output: Path) -> None:
    """Raise FileNotFoundError if a folder has no run to go on with."""
    if not (output / STATE_FILE).is_file():
        raise FileNotFoundError(
            f"--resume: --output {output} has no {STATE_FILE}. Give the folder of a run that was paused "
            "(--pause-minutes) or broken off after a checkpoint (--save-minutes); a run that has ended has none"
        )


def load_state(output: Path, plan: TrainingPlan) -> TrainingState:
    """Return the checkpoint in a folder, for a run that goes on by `plan`.

    Raises FileNotFoundError if there is none, and ValueError that names the options that are not those of the run.
    """
    _check_resumable(output)
    content = torch.load(output / STATE_FILE, map_location="cpu", weights_only=True)
    now = asdict(plan)
    changed = [name for name in now if name not in FREE_TO_CHANGE and now[name] != content["plan"].get(name)]
    if changed:
        values = ", ".join(f"{name} was {content['plan'].get(name)} and is {now[name]}" for name in changed)
        raise ValueError(f"--resume {output}: the run has other settings: {values}. Give the same options")
    return TrainingState(**{**content, "plan": plan})


def begin_or_resume(output: Path, plan: TrainingPlan, resume: bool) -> TrainingState | None:
    """Return the checkpoint to go on from with `resume`, otherwise None. Raises what `load_state` or `check_output`
    does."""
    if resume:
        return load_state(output, plan)
    check_output(output)
    return None


def restore(state: TrainingState, model: Any) -> None:
    """Put the trained parameters into the model. Raises ValueError if it has others."""
    own = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    shapes = {name: tuple(parameter.shape) for name, parameter in own.items()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in state.trained.items()}:
        raise ValueError("--resume: the checkpoint has other parameters than the model: was it of another shape?")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state.trained[name])


def end_state(output: Path) -> None:
    """Remove the checkpoint of a run that has ended: what is left is a model directory."""
    (output / STATE_FILE).unlink(missing_ok=True)
