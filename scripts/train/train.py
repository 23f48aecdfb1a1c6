r"""Train a demo model on synthetic worlds: from scratch with any shape, or on from a model directory.

    python scripts/train/train.py --output long --from inputs/demo-model --lengths 2048 4096 --minutes 8
    python scripts/train/train.py --output third --layers 10 --heads 7 --hidden 448 --mlp 1024 \
        --vocabulary 3072 --lengths 1024 2048 4096 --short-share 0.4 --minutes 9

It is the loop of `vllm-blend finetune`, but every prompt is computed in full, so that the model knows nothing about
reuse. A row is a world with some of its questions, as far as they fit; an answer weighs as much as 40 tokens of
context. Worlds come from the training split, and another --seed gives others; --target ends the training by the
development split. A run that was paused (--pause-minutes) or broken off goes on with --resume. The exit status is 0, or
2 for bad input (before any work) and if training diverges.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from tokenizer import train_tokenizer  # noqa: E402

from vllm_blend.devices import resolve_device  # noqa: E402
from vllm_blend.finetune import attention  # noqa: E402
from vllm_blend.finetune.options import add_training_options, make_plan  # noqa: E402
from vllm_blend.finetune.plan import TrainingPlan  # noqa: E402
from vllm_blend.finetune.run import Student, run_training  # noqa: E402
from vllm_blend.finetune.sources import WorldOptions, leading_bos, world_source  # noqa: E402
from vllm_blend.finetune.state import begin_or_resume  # noqa: E402
from vllm_blend.finetune.worlds import TRAINING_SEEDS  # noqa: E402
from vllm_blend.models.loader import load_hf_config  # noqa: E402

HEAD_DIM, ROPE_THETA = 64, 10_000.0
HELP = {
    "hidden": "hidden size",
    "heads": f"query heads of {HEAD_DIM}",
    "kv_heads": "KV heads (default: a third of the heads, or 1 if that is not whole)",
    "mlp": "hidden size of the MLP",
    "vocabulary": "tokens",
}
SHAPE = {"layers": 12, "hidden": 384, "heads": 6, "kv_heads": None, "mlp": 768, "vocabulary": 2048}
FROM_SCRATCH = TrainingPlan(
    batch_size=64, steps=1, learning_rate=1.5e-3, warmup_steps=300, decay_share=0.5, weight_decay=0.05
)
GOING_ON = {"learning_rate": 6e-4, "warmup_steps": 60, "decay_share": 0.6, "weight_decay": 0.02}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    defaults = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in GOING_ON.items())
    add("--output", type=Path, required=True, metavar="DIR", help="new model directory")
    add("--from", dest="start", metavar="MODEL", help=f"go on from this model; the defaults are then {defaults}")
    add("--positions", type=int, help="positions of the model (default: the longest rows, or as many as --from has)")
    add("--lengths", type=int, nargs="+", default=[1024], metavar="N", help="tokens of rows (default: 1024)")
    add("--length-shares", type=float, nargs="+", metavar="S", help="share of batches of each length (default: equal)")
    add(
        "--short-share",
        type=float,
        default=0.0,
        help="share of the training, at its beginning, with the shortest rows alone (default: %(default)s)",
    )
    shape = parser.add_argument_group("shape, from scratch")
    for name, default in SHAPE.items():
        text = HELP.get(name, name) + ("" if default is None else f" (default: {default})")
        shape.add_argument(f"--{name.replace('_', '-')}", type=int, default=argparse.SUPPRESS, help=text)
    add_training_options(parser, FROM_SCRATCH, prompts=240_000)
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the options. Ends with a message and status 2 for bad ones."""
    parser = make_parser()
    if parser.parse_args(argv).start:
        parser.set_defaults(**GOING_ON)
    args = parser.parse_args(argv)
    given = [name for name in SHAPE if hasattr(args, name)]
    if args.start and given:
        parser.error(f"--{given[0].replace('_', '-')} is for training from scratch: --from {args.start} has a shape")
    for name, default in SHAPE.items():
        setattr(args, name, getattr(args, name, default))
    if args.kv_heads is None:
        args.kv_heads = args.heads // 3 if args.heads % 3 == 0 else 1
    for name in SHAPE:
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, not {getattr(args, name)}")
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}")
    if args.minutes is None and args.steps is None:
        args.minutes = 9.0
    return args


def starting_config(args: argparse.Namespace) -> Any:
    """Return the configuration of the model to train. Raises ValueError if it has too few positions for the rows."""
    longest = max(args.lengths)
    if args.start:
        config = load_hf_config(args.start)
        attention.check_supported(config, args.start, longest)
        config.max_position_embeddings = args.positions or max(longest, config.max_position_embeddings)
    else:
        config = LlamaConfig(
            vocab_size=args.vocabulary,
            hidden_size=args.hidden,
            intermediate_size=args.mlp,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.kv_heads,
            head_dim=HEAD_DIM,
            max_position_embeddings=args.positions or longest,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
            tie_word_embeddings=True,
            dtype=torch.bfloat16,
        )
    if config.max_position_embeddings < longest:
        raise ValueError(f"--positions {config.max_position_embeddings} is less than the longest rows, {longest}")
    return config


def make_model(args: argparse.Namespace, config: Any) -> Any:
    """Return the model in float32: that of --from, or a new one, in which layers that write to the residual stream
    start smaller, as in GPT-2."""
    if args.start:
        return AutoModelForCausalLM.from_pretrained(
            args.start, config=config, dtype=torch.float32, attn_implementation=attention.NAME
        )
    torch.manual_seed(args.seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention.NAME)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.div_(math.sqrt(2 * config.num_hidden_layers))
    return model


def run(args: argparse.Namespace, say: Any) -> None:
    """Train, and write the model. Raises ValueError or OSError for bad input."""
    plan = make_plan(args, shares=None, short_share=args.short_share)
    resumed = begin_or_resume(args.output, plan, args.resume)
    shares = args.length_shares or [1.0] * len(args.lengths)
    received = 0 if resumed is None else resumed.rows
    options = WorldOptions(args.lengths, shares, args.prompts, args.seed, args.workers, args.development_rows, received)
    config = starting_config(args)
    if resumed is not None or args.start:
        tokenizer: Any = AutoTokenizer.from_pretrained(args.output if resumed is not None else args.start)
        tokenizer.model_max_length = config.max_position_embeddings
    else:
        # The tokenizer's worlds come from the end of the seeds, where no run of the usual length takes rows from.
        last_seed = TRAINING_SEEDS.stop - 1 - args.seed
        tokenizer = train_tokenizer(args.vocabulary, last_seed, config.max_position_embeddings)
    if not args.start:
        config.update({f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")})
    source = world_source(
        options, tokenizer.backend_tokenizer.to_str(), leading_bos(tokenizer), tokenizer.pad_token_id or 0
    )
    attention.register()
    dtype = config.dtype or torch.bfloat16  # loading sets it to that of training
    model = make_model(args, config).to(resolve_device(args.device))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say(f"{parameters / 1e6:.1f}M parameters, {config.max_position_embeddings} positions")
    student = Student(model, tokenizer, dtype)
    run_training(student, source, plan, args.output, say, resumed=resumed)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        run(args, lambda line: print(line, flush=True))
    except (OSError, ValueError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
