"""`vllm-blend finetune`: continue training a model until it answers as well from reused chunk KV as from full prefill.

    vllm-blend finetune inputs/demo-model --output my-model --worlds --minutes 7
    vllm-blend finetune Qwen/Qwen3-0.6B --output my-model --dataset hotpot_train_v1.1.json --steps 2000 --distill 1
    vllm-blend finetune mistralai/Mistral-7B-v0.3 --measure-only --lora-rank 16 --max-length 4096 --batch-size 1

Prompts are computed in full, from chunks that were encoded on their own, or with a part of the chunks recomputed; most
of the training goes into the answers, and with --distill the model as it was shows what it answers in full.
docs/models.md says which models can be trained, and docs/finetune.md explains the method. The exit status is 0, or 2
for bad input (before any work) and if training diverges.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_blend.command_line import BAD_INPUT, CommandParser
from vllm_blend.devices import resolve_device
from vllm_blend.finetune import attention
from vllm_blend.finetune.loop import compile_layers
from vllm_blend.finetune.lora import Adapter, check_lora
from vllm_blend.finetune.masks import MaskShares
from vllm_blend.finetune.measure import fit_to_memory, measure
from vllm_blend.finetune.options import add_training_options, make_plan
from vllm_blend.finetune.plan import TrainingPlan
from vllm_blend.finetune.replicas import Replicas, joined
from vllm_blend.finetune.rows import LENGTH_MULTIPLE
from vllm_blend.finetune.run import Student, run_training
from vllm_blend.finetune.samples import Asked
from vllm_blend.finetune.sources import (
    Source,
    WorldOptions,
    dataset_source,
    leading_bos,
    pad_token,
    world_source,
)
from vllm_blend.finetune.state import begin_or_resume
from vllm_blend.finetune.teacher import FrozenModel, Teacher, WithoutAdapter, check_vocabulary
from vllm_blend.models.gguf.names import conversion, names_gguf
from vllm_blend.models.loader import load_hf_config

CONTEXTS = ("prefix", "bos")
# Of the recipe for the demo models, which were trained from scratch at such rates, and of models that others trained.
WORLDS_RATE, WORLDS_BATCH = 6e-4, 64
RATE, ADAPTER_RATE, BATCH = 5e-5, 2e-4, 16
LATER = {
    "learning_rate": f"{RATE:g}, with --lora-rank {ADAPTER_RATE:g}, with --worlds {WORLDS_RATE:g}",
    "batch_size": f"{BATCH}, with --worlds {WORLDS_BATCH}",
    "accumulate": "as few as the memory takes",
    "checkpoint_activations": "if training would take more than half of the free memory without it",
}


def finetune(args: argparse.Namespace, say: Any) -> int:
    """Run the command. Raises ValueError or OSError for bad input."""
    check_options(args)
    for name, value in usual_values(args).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    config = load_hf_config(args.model)
    lengths = row_lengths(args, config.max_position_embeddings)
    attention.check_supported(config, args.model, max(lengths))
    device = resolve_device(args.device)
    if args.measure_only:
        plan = make_plan(args, mask_shares(args, None), args.distill)
        say(measure(config, plan, lengths[0], args.lora_rank, args.lora_alpha, device))
        return 0
    with joined(device) as (replicas, own):
        run(args, config, lengths, own, replicas, say if replicas.leads else _say_nothing)
    return 0


def run(
    args: argparse.Namespace, config: Any, lengths: list[int], device: torch.device, replicas: Replicas, say: Any
) -> None:
    """Train as one of the replicas, on its device."""
    if args.teacher:
        check_vocabulary(config, load_hf_config(args.teacher), args.teacher)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    plan = make_plan(args, mask_shares(args, leading_bos(tokenizer)), args.distill)
    resumed = begin_or_resume(args.output, plan, args.resume)
    received = 0 if resumed is None else resumed.rows
    source = make_source(args, tokenizer, config.vocab_size, lengths, received, replicas, say)
    if plan.target is not None and not source.development:
        raise ValueError(f"--target {plan.target} needs development rows: give --development FILE, or --worlds")
    saving = args.checkpoint_activations, args.accumulate
    plan = fit_to_memory(config, plan, max(source.lengths), bool(args.lora_rank), device, *saving)
    say(_told(plan, max(source.lengths), source.capacities))
    attention.register()
    student = make_student(args, config, tokenizer, device)
    teacher = make_teacher(args, student, plan.compile, device)
    run_training(student, source, plan, args.output, say, teacher, resumed, replicas)


def _told(plan: TrainingPlan, length: int, capacities: Sequence[int]) -> str:
    """Return how the training goes about it, for the user."""
    again = ", computing activations twice" if plan.checkpoint_activations else ""
    parts = f", {plan.batch_size // plan.accumulate} at a time{again}"
    rows = f"{sum(capacities)} rows of up to {length} tokens"
    return f"{rows}: {plan.batch_size} in a step{parts}, learning rate {plan.learning_rate:g}"


def _say_nothing(line: object) -> None:
    """Leave the telling to rank 0."""


def usual_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of options whose defaults depend on what is trained."""
    rate = WORLDS_RATE if args.worlds else ADAPTER_RATE if args.lora_rank else RATE
    return {"learning_rate": rate, "batch_size": WORLDS_BATCH if args.worlds else BATCH}


def check_options(args: argparse.Namespace) -> None:
    """Raise ValueError for options that are bad whatever the model."""
    check_lora(args.lora_rank, args.lora_alpha)
    if args.attention == "flex" and resolve_device(args.device).type != "cuda":
        raise ValueError("--attention flex needs a GPU, as FlexAttention has no backward pass on a CPU: use dense")
    if args.teacher and not args.distill:
        raise ValueError(f"--teacher {args.teacher} without --distill does nothing: give --distill 1 too")
    if args.measure_only:
        args.steps = args.steps or 5
        return
    for name in (args.model, args.teacher):
        if name is not None and names_gguf(name):
            place = Path(name)
            raise ValueError(
                f"{name!r} is a GGUF file, and models are trained from safetensors: give the directory or Hub id of "
                "the model that the file was made of, or convert the file with transformers: "
                f"{conversion(repr(str(place.parent)), repr(place.name))}; and save its tokenizer there too "
                "(docs/models.md has the lines)"
            )
    if args.output is None:
        raise ValueError("give --output DIR: where the model is to be written")
    if not args.worlds and not args.dataset:
        raise ValueError("give --worlds, or --dataset FILE")
    if args.worlds and args.development:
        raise ValueError("--worlds has development worlds of its own: leave out --development")


def mask_shares(args: argparse.Namespace, bos: int | None) -> MaskShares:
    """Return how prompts are computed. After `bos`, chunks see the BOS token alone, where prompts begin with one."""
    sinks = None if args.encoding_context == "prefix" else 0 if bos is None else 1
    return MaskShares(args.full, args.isolated, args.mixed, args.max_recomputed, sinks)


def row_lengths(args: argparse.Namespace, positions: int) -> list[int]:
    """Return the lengths of rows of worlds, or the greatest length of a data set's."""
    if args.lengths:
        if not args.worlds:
            raise ValueError("--lengths is for --worlds: use --max-length")
        lengths, name = list(args.lengths), "--lengths"
    else:
        longest = min(positions, 1024 if args.worlds else positions) if args.max_length is None else args.max_length
        lengths, name = [longest], "--max-length"
    for length in lengths:
        if not 0 < length <= positions:
            raise ValueError(f"{name} is {length}: use 1 to {positions}, as the model has {positions} positions")
    return lengths


def make_source(
    args: argparse.Namespace,
    tokenizer: Any,
    vocab_size: int,
    lengths: list[int],
    received: int,
    replicas: Replicas,
    say: Any,
) -> Source:
    """Return the source of rows that --worlds or --dataset names."""
    if not args.worlds:
        asked = Asked(tokenizer, vocab_size, lengths[0], args.style, args.instruction, args.template)
        return dataset_source(args.dataset, args.development or [], asked, say, replicas)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{args.model} has no tokenizer.json: --worlds needs one, --dataset does not")
    if not args.lengths:
        lengths = [lengths[0] - lengths[0] % LENGTH_MULTIPLE]
    shares = args.length_shares or [1.0] * len(lengths)
    workers = -(-args.workers // replicas.size)
    options = WorldOptions(lengths, shares, args.prompts, args.seed, workers, args.development_rows, received, replicas)
    return world_source(options, backend.to_str(), leading_bos(tokenizer), pad_token(tokenizer))


def make_student(args: argparse.Namespace, config: Any, tokenizer: Any, device: torch.device) -> Student:
    """Load what is trained: float32, but a model that only gets an adapter keeps its own dtype on a GPU."""
    own = config.dtype or torch.bfloat16
    dtype = own if args.lora_rank and device.type == "cuda" else torch.float32
    model = load_model(args.model, dtype, device, args.attention)
    adapter = Adapter(model, args.lora_rank, args.lora_alpha) if args.lora_rank else None
    return Student(model, tokenizer, own, adapter)


def load_model(name: str, dtype: torch.dtype, device: torch.device, kind: str = "dense") -> Any:
    """Load a causal model that can attend as reuse does, with a `kind` of `attention.IMPLEMENTATIONS`."""
    implementation = attention.IMPLEMENTATIONS[kind]
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=implementation)
    return model.to(device)


def make_teacher(args: argparse.Namespace, student: Student, compiled: bool, device: torch.device) -> Teacher | None:
    """Return the teacher of --distill: --teacher, else the model as it is now."""
    if not args.distill:
        return None
    if student.adapter is not None and not args.teacher:
        return WithoutAdapter(student.model, student.adapter)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    name = args.teacher or args.model
    model = load_model(name, dtype, device)
    if compiled:
        compile_layers(model)
    return FrozenModel(model)


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vllm-blend finetune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, shares = parser.add_argument, MaskShares()
    add("model", help="model directory or Hugging Face id; with --measure-only, config.json is enough")
    add("--output", type=Path, metavar="DIR", help="new model directory")
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--worlds", action="store_true", help="train on the demo model's synthetic worlds")
    data.add_argument(
        "--dataset",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="train on data sets as published (HotpotQA, 2WikiMultihopQA, MuSiQue, SQuAD, LongBench, CacheBlend's), "
        'questions of your own, or {"text": ...} in every line',
    )
    add("--development", type=Path, nargs="+", metavar="FILE", help="data sets that are asked, but not trained on")
    add(
        "--style",
        help="ask as musique, wikimqa, samsum or by-name, as the file is called (default: by the model's chat "
        "template, or by-name if it has none)",
    )
    add("--instruction", default="", metavar="TEXT", help="what stands before the passages")
    add("--template", default="", metavar="TEXT", help="what stands after them, with {question} in it")
    add(
        "--max-length",
        type=int,
        help="longest prompt with its answers, in tokens (default: the model's positions, with --worlds at most 1024)",
    )
    add("--lengths", type=int, nargs="+", metavar="N", help="with --worlds: rows of several lengths, in tokens")
    add("--length-shares", type=float, nargs="+", metavar="S", help="share of batches of each length (default: equal)")
    add("--full", type=float, default=shares.full, help="share of prompts computed in full (default: %(default)s)")
    add("--isolated", type=float, default=shares.isolated, help="share of prompts all reused (default: %(default)s)")
    add(
        "--mixed",
        type=float,
        default=shares.mixed,
        help="share of prompts in which each chunk is reused or computed whole, at random (default: %(default)s)",
    )
    add(
        "--max-recomputed",
        type=float,
        default=shares.max_recomputed,
        help="of the other prompts, at most this share of the chunks' tokens is recomputed (default: %(default)s)",
    )
    add(
        "--encoding-context",
        choices=CONTEXTS,
        default=CONTEXTS[0],
        help="what a chunk sees of what stands before it: the whole prefix, or BOS alone (default: %(default)s)",
    )
    add(
        "--distill",
        type=float,
        default=0.0,
        metavar="WEIGHT",
        help="weight of a frozen teacher's distribution on answers, beside 1 for the answers themselves (default: 0)",
    )
    add("--teacher", help="the teacher, with the same tokenizer (default: the model as it is at the start)")
    add(
        "--attention",
        choices=list(attention.IMPLEMENTATIONS),
        default="dense",
        help="how masks are computed: flex needs a GPU, and leaves out blocks that no token sees (default: dense)",
    )
    add("--lora-rank", type=int, default=0, help="train an adapter of this rank alone; 0 trains all (default: 0)")
    add("--lora-alpha", type=int, default=32, help="weight of the adapter, times its rank (default: %(default)s)")
    add(
        "--measure-only",
        action="store_true",
        help="run --steps (default 5) on random weights and tokens, and print tokens per second and the peak of memory",
    )
    add_training_options(parser, TrainingPlan(steps=1), prompts=120_000, later=LATER)
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
