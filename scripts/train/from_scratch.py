"""Train a tokenizer and a Llama of a given size on synthetic worlds: a second model to test blending on.

    python scripts/train/from_scratch.py --output my-model --layers 10 --mlp 1024 --vocabulary 3072 --seed 7 --minutes 9

It is the demo model's recipe (`train.py`), in the loop of `vllm-blend finetune` but with every prompt computed in full,
so that the model knows nothing about reuse. Another seed gives other worlds.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from vllm_blend.finetune.loop import TrainingPlan, train  # noqa: E402
from vllm_blend.finetune.rows import RowPool  # noqa: E402
from vllm_blend.finetune.saving import check_output, save_model  # noqa: E402
from vllm_blend.finetune.worlds import TRAINING_SEEDS, WorldRows, draw_episode, run_seeds, world_shards  # noqa: E402
from vllm_blend.pipeline.prompts import PROMPT_STYLES, render_passage  # noqa: E402

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
POSITIONS, HEAD_DIM, ROPE_THETA = 1024, 64, 10_000.0
TOKENIZER_WORLDS = 3000


def world_texts(seed: int, worlds: int) -> Iterator[str]:
    """Yield the pieces of prompts, each as a text of its own."""
    rng = Random(seed)
    for _ in range(worlds):
        episode = draw_episode(rng)
        yield episode.instruction
        for passage in episode.passages:
            yield render_passage(passage.title, passage.text)
        for question in episode.questions:
            yield PROMPT_STYLES["samsum" if question.kind == "sum" else "musique"].suffix(question.text)
            yield f" {question.answer}\n"


def train_tokenizer(vocabulary: int, seed: int, worlds: int = TOKENIZER_WORLDS) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE that puts BOS before a text: the demo model's, with another vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(world_texts(seed, worlds), trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"--vocabulary {vocabulary}: the worlds give {tokenizer.get_vocab_size()} tokens")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama with tied embeddings, float32. Layers that write to the residual stream start smaller, as in
    GPT-2."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.div_(math.sqrt(2 * args.layers))
    return model


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a tokenizer and a Llama from scratch on synthetic worlds.")
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="new model directory")
    add("--layers", type=int, default=12, help="(default: %(default)s)")
    add("--hidden", type=int, default=384, help="hidden size (default: %(default)s)")
    add("--heads", type=int, default=6, help=f"query heads of {HEAD_DIM} (default: %(default)s)")
    add("--kv-heads", type=int, default=2, help="(default: %(default)s)")
    add("--mlp", type=int, default=768, help="hidden size of the MLP (default: %(default)s)")
    add("--vocabulary", type=int, default=2048, help="tokens (default: %(default)s)")
    add("--seed", type=int, default=7, help="seed of worlds and weights (default: %(default)s)")
    add("--minutes", type=float, help="minutes of training, with compilation (default: 9, without --steps)")
    add("--steps", type=int, help="steps of training")
    add("--save-minutes", type=float, help="minutes between checkpoints (default: only one, at the end)")
    add("--prompts", type=int, default=240_000, help="worlds to make (default: %(default)s)")
    add("--batch-size", type=int, default=128, help="prompts in a step (default: %(default)s)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes that make worlds (default: %(default)s)")
    add("--compile", action=argparse.BooleanOptionalAction, help="use torch.compile (default: on a GPU)")
    args = parser.parse_args(argv)
    for name in ("layers", "hidden", "heads", "kv_heads", "mlp", "vocabulary"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, not {getattr(args, name)}")
    if args.heads % args.kv_heads:
        parser.error(f"--heads {args.heads} must be a multiple of --kv-heads {args.kv_heads}")
    return args


def run(args: argparse.Namespace, say: Any) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = TrainingPlan(
        batch_size=args.batch_size,
        minutes=9.0 if args.minutes is None and args.steps is None else args.minutes,
        steps=args.steps,
        learning_rate=1.5e-3,
        warmup_steps=300,
        decay_share=0.5,
        weight_decay=0.05,
        shares=None,
        compile=device.type == "cuda" if args.compile is None else args.compile,
        save_minutes=args.save_minutes,
        log_steps=250,
        seed=args.seed,
    )
    check_output(args.output)
    seeds = run_seeds(args.seed, args.prompts)
    # The tokenizer's worlds come from the end of the seeds, where no run of the usual length takes rows from.
    tokenizer = train_tokenizer(args.vocabulary, TRAINING_SEEDS.stop - 1 - args.seed)
    source = WorldRows(tokenizer.backend_tokenizer.to_str(), tokenizer.bos_token_id, tokenizer.pad_token_id, POSITIONS)
    source.check()
    with world_shards(source, seeds, args.workers) as shards:
        model: Any = make_model(args, tokenizer)  # transformers wraps `to` in a way that has no useful type
        model.to(device)
        say(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters")
        pool = RowPool(args.prompts, POSITIONS, device, args.seed)
        last = train(model, pool, shards, plan, say, lambda: save_model(model, tokenizer, torch.bfloat16, args.output))
    save_model(model, tokenizer, torch.bfloat16, args.output)
    say(f"{last.step} steps over {len(pool)} prompts (pass {pool.epoch}); model in {args.output}")


def main(argv: Sequence[str] | None = None) -> int:
    try:
        run(parse_args(argv), lambda line: print(line, flush=True))
    except (OSError, ValueError) as error:
        print(f"from_scratch.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
