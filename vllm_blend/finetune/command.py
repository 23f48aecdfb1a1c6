"""`vllm-blend finetune`: continue training a model until it answers as well from reused chunk KV as from full prefill.

    vllm-blend finetune inputs/demo-model --output my-model --worlds --minutes 7
    vllm-blend finetune Qwen/Qwen3-0.6B --output my-model --dataset train_musique.json --steps 2000

Prompts are computed in full, from chunks that were encoded on their own, or with a share of the chunks' tokens
recomputed; most of the training goes into the answers. Llama, Qwen2 and Qwen3 models of transformers can be trained.
docs/finetune.md explains the method. The exit status is 0, or 2 for bad input (before any work) and if training
diverges.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from vllm_blend.devices import resolve_device
from vllm_blend.finetune import attention
from vllm_blend.finetune.loop import TrainingPlan, train
from vllm_blend.finetune.masks import MaskShares
from vllm_blend.finetune.rows import LENGTH_MULTIPLE, RowPool, Rows, pad_rows
from vllm_blend.finetune.samples import sample_rows
from vllm_blend.finetune.saving import check_output, save_model
from vllm_blend.finetune.worlds import WorldRows, run_seeds, world_shards

BAD_INPUT = 2


@dataclass(frozen=True)
class Source:
    """Rows to come: how many, how many tokens each, and a context manager that yields them."""

    rows: int
    length: int
    shards: AbstractContextManager[Iterator[Rows]]


def finetune(args: argparse.Namespace, say: Any) -> int:
    """Run the command. Raises ValueError or OSError for bad input."""
    plan = make_plan(args)
    check_output(args.output)
    config = AutoConfig.from_pretrained(args.model)
    attention.check_supported(config, args.model)
    device = resolve_device(args.device)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    source = make_source(args, tokenizer, config.max_position_embeddings, say)
    attention.register()
    with source.shards as shards:
        model: Any = AutoModelForCausalLM.from_pretrained(
            args.model, dtype=torch.float32, attn_implementation=attention.NAME
        )
        model = model.to(device)
        dtype = config.dtype or torch.bfloat16
        pool = RowPool(source.rows, source.length, device, args.seed)
        last = train(model, pool, shards, plan, say, lambda: save_model(model, tokenizer, dtype, args.output))
    save_model(model, tokenizer, dtype, args.output)
    say(f"{last.step} steps over {len(pool)} prompts (pass {pool.epoch}); model in {args.output}")
    return 0


def make_plan(args: argparse.Namespace) -> TrainingPlan:
    shares = MaskShares(args.full, args.isolated, args.max_recomputed)
    names = ["batch_size", "minutes", "steps", "learning_rate", "warmup_steps", "weight_decay"]
    names += ["save_minutes", "log_steps", "seed"]
    compiled = resolve_device(args.device).type == "cuda" if args.compile is None else args.compile
    return TrainingPlan(**{name: getattr(args, name) for name in names}, shares=shares, compile=compiled)


def make_source(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, positions: int, say: Any) -> Source:
    """Return the source of rows that --worlds or --dataset names. Data sets are read at once; worlds are made during
    training."""
    longest = min(positions, 1024 if args.worlds else positions) if args.max_length is None else args.max_length
    if not 0 < longest <= positions:
        raise ValueError(f"--max-length is {longest}: use 1 to {positions}, as the model has {positions} positions")
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    bos = leading_bos(tokenizer)
    if args.worlds:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{args.model} has no tokenizer.json: --worlds needs one, --dataset does not")
        if args.workers < 0:
            raise ValueError(f"--workers is {args.workers}: use 0 or more processes")
        worlds = WorldRows(backend.to_str(), bos, padding, longest - longest % LENGTH_MULTIPLE)
        worlds.check()
        seeds = run_seeds(args.seed, args.prompts)
        return Source(args.prompts, worlds.length, world_shards(worlds, seeds, args.workers))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    rows, left_out = sample_rows(args.dataset, args.style, encode, bos, longest)
    if left_out:
        say(f"{len(left_out)} samples are left out as longer than {longest} tokens")
    length = -(-max(map(len, rows)) // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return Source(len(rows), length, nullcontext(iter([pad_rows(rows, length, padding)])))


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the BOS that the tokenizer puts before a text, or None if it puts none."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and list(tokenizer.encode("", add_special_tokens=True))[:1] == [bos] else None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-blend finetune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, plan, shares = parser.add_argument, TrainingPlan(steps=1), MaskShares()
    add("model", help="model directory or Hugging Face id")
    add("--output", type=Path, required=True, metavar="DIR", help="new model directory")
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--worlds", action="store_true", help="train on the demo model's synthetic worlds")
    data.add_argument(
        "--dataset", type=Path, nargs="+", metavar="FILE", help="train on data sets, one question a prompt"
    )
    add("--style", help="how to ask data sets (musique, wikimqa, samsum), if a file's name does not say it")
    add("--minutes", type=float, help="minutes of training, with compilation")
    add("--steps", type=int, help="steps of training; with --minutes, the first limit ends it")
    add("--prompts", type=int, default=120_000, help="with --worlds: how many prompts to make (default: %(default)s)")
    workers = os.cpu_count() or 1
    add("--workers", type=int, default=workers, help="with --worlds: processes that make them (default: %(default)s)")
    add(
        "--max-length",
        type=int,
        help="longest prompt with its answers, in tokens (default: the model's positions, with --worlds at most 1024)",
    )
    add("--full", type=float, default=shares.full, help="share of prompts computed in full (default: %(default)s)")
    add("--isolated", type=float, default=shares.isolated, help="share of prompts all reused (default: %(default)s)")
    add(
        "--max-recomputed",
        type=float,
        default=shares.max_recomputed,
        help="of the other prompts, at most this share of the chunks' tokens is recomputed (default: %(default)s)",
    )
    add("--batch-size", type=int, default=plan.batch_size, help="prompts in a step (default: %(default)s)")
    add("--learning-rate", type=float, default=plan.learning_rate, help="peak learning rate (default: %(default)s)")
    add("--warmup-steps", type=int, default=plan.warmup_steps, help="steps up to the peak (default: %(default)s)")
    add("--weight-decay", type=float, default=plan.weight_decay, help="weight decay of matrices (default: %(default)s)")
    add("--save-minutes", type=float, help="minutes between checkpoints (default: only one, at the end)")
    add("--log-steps", type=int, default=plan.log_steps, help="steps between progress reports (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of worlds, masks and order (default: %(default)s)")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto, cpu or cuda (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, help="use torch.compile (default: on a GPU)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        return finetune(args, lambda line: print(line, flush=True))
    except (OSError, ValueError) as error:
        parser.exit(BAD_INPUT, f"{parser.prog}: error: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
