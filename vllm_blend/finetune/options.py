"""The options that `vllm-blend finetune` and `scripts/train/train.py` share, and the plan that they make."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from vllm_blend.devices import resolve_device
from vllm_blend.finetune.masks import MaskShares
from vllm_blend.finetune.plan import TrainingPlan

PLANNED = (
    *("batch_size", "accumulate", "checkpoint_activations", "minutes", "steps", "learning_rate", "warmup_steps"),
    *("decay_share", "weight_decay", "target", "evaluate_steps", "save_minutes", "pause_minutes", "log_steps", "seed"),
)


def add_training_options(
    parser: argparse.ArgumentParser, defaults: TrainingPlan, prompts: int, later: Mapping[str, str] | None = None
) -> None:
    """Add the options of a training run, with these defaults. Those in `later`, which says what their defaults are, are
    None if they are not given."""
    group = parser.add_argument_group("training")

    def add(flag: str, **settings: Any) -> None:
        told = (later or {}).get(flag.removeprefix("--").replace("-", "_"))
        if told is not None:
            what = settings["help"].partition(" (default")[0]
            settings |= {"default": None, "help": f"{what} (default: {told})"}
        group.add_argument(flag, **settings)

    add("--minutes", type=float, help="minutes of training, with compilation")
    add("--steps", type=int, help="steps of training; with --minutes, the first limit ends it")
    add("--batch-size", type=int, default=defaults.batch_size, help="prompts in a step (default: %(default)s)")
    add("--accumulate", type=int, default=1, help="parts that a batch is computed in, to save memory (default: 1)")
    add(
        "--checkpoint-activations",
        action=argparse.BooleanOptionalAction,
        help="compute activations again in the backward pass, to save memory (default: no)",
    )
    add("--learning-rate", type=float, default=defaults.learning_rate, help="peak learning rate (default: %(default)s)")
    add("--warmup-steps", type=int, default=defaults.warmup_steps, help="steps up to the peak (default: %(default)s)")
    add(
        "--decay-share",
        type=float,
        default=defaults.decay_share,
        help="share of the training over which the rate falls, at the end (default: %(default)s)",
    )
    add("--weight-decay", type=float, default=defaults.weight_decay, help="decay of matrices (default: %(default)s)")
    add("--target", type=float, help="end as soon as this share of the answer tokens of the development rows is right")
    add(
        "--evaluate-steps",
        type=int,
        default=defaults.evaluate_steps,
        help="steps between the questions about them (default: %(default)s)",
    )
    add("--save-minutes", type=float, help="minutes between checkpoints (default: only at a pause and at the end)")
    add("--pause-minutes", type=float, help="end this process after so many minutes, with a checkpoint for --resume")
    add("--resume", action="store_true", help="go on from the checkpoint in --output, with the same options")
    add(
        "--log-steps",
        type=int,
        default=defaults.log_steps,
        help="steps between progress reports (default: %(default)s)",
    )
    add("--seed", type=int, default=defaults.seed, help="seed of worlds, masks and order (default: %(default)s)")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto, cpu or cuda (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, help="use torch.compile (default: on a GPU)")
    add(
        "--development-rows",
        type=int,
        default=64,
        help="development worlds of each length that are asked during training (default: %(default)s)",
    )
    workers = os.cpu_count() or 1
    add("--prompts", type=int, default=prompts, help="how many worlds to make (default: %(default)s)")
    add("--workers", type=int, default=workers, help="processes that make worlds (default: %(default)s)")


def make_plan(
    args: argparse.Namespace, shares: MaskShares | None, distill: float = 0.0, short_share: float = 0.0
) -> TrainingPlan:
    """Return the plan that the options make. Raises ValueError that names a bad option."""
    compiled = resolve_device(args.device).type == "cuda" if args.compile is None else args.compile
    given = {name: getattr(args, name) for name in PLANNED}
    given["checkpoint_activations"] = bool(args.checkpoint_activations)
    given["accumulate"] = args.accumulate or 1
    return TrainingPlan(**given, shares=shares, distill=distill, short_share=short_share, compile=compiled)
