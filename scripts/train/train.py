"""Train the demo model on synthetic worlds and write it as a Hugging Face model directory.

    python scripts/train/train.py --output-dir my-model --minutes 9

Each row is one context followed by as many of its questions as fit 1,024 tokens. Every token is trained on, an answer's
tokens about 20 times as much (shared over the answer, so that long answers do not weigh more than short ones).
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from model import DemoModel, ModelConfig, save_pretrained  # noqa: E402

from vllm_blend.finetune.worlds import draw_episode  # noqa: E402
from vllm_blend.pipeline.prompts import PROMPT_STYLES, render_passage  # noqa: E402
from vllm_blend.quality.worlds import Episode  # noqa: E402

FIRST_SEED, SHARDS = 1000, 60
CONTEXT_WEIGHT = 5
WARMUP_STEPS, LEARNING_RATE, FINAL_SHARE = 300, 1.5e-3, 0.02


def encode_episode(episode: Episode, tokenizer: Tokenizer, length: int) -> tuple[list[int], list[int]]:
    """Return token ids (BOS first, pieces tokenized one by one) and a training weight for each, in tenths."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    ids = [0, *encode(episode.instruction)]
    for passage in episode.passages:
        ids += encode(render_passage(passage.title, passage.text))
    weights = [CONTEXT_WEIGHT] * len(ids)
    for question in episode.questions:
        style = PROMPT_STYLES["samsum" if question.kind == "sum" else "musique"]
        asked, answer = encode(style.suffix(question.text)), encode(f" {question.answer}\n")
        if len(ids) + len(asked) + len(answer) > length:
            break
        ids += asked + answer
        weights += [CONTEXT_WEIGHT] * len(asked) + [max(10, min(200, 200 // len(answer)))] * len(answer)
    return ids, weights


def make_rows(seed: int, rows: int, length: int, tokenizer_file: str) -> tuple[np.ndarray, np.ndarray]:
    """Return `rows` padded token rows and their weights (0 on padding), each [rows, length], from one random stream."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rng, tokenizer = Random(seed), Tokenizer.from_file(tokenizer_file)
    ids, weights = np.full((rows, length), 2, np.int16), np.zeros((rows, length), np.uint8)
    filled = 0
    while filled < rows:
        row, weight = encode_episode(draw_episode(rng), tokenizer, length)
        if len(row) <= length:
            ids[filled, : len(row)], weights[filled, : len(row)] = row, weight
            filled += 1
    return ids, weights


def train(
    model: DemoModel, ids: torch.Tensor, weights: torch.Tensor, batch_size: int, seconds: float, max_steps: int
) -> float:
    """Train until the time or the steps are up; return the last loss. The learning rate falls over the second half."""
    device = ids.device.type
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    forward = torch.compile(model) if device == "cuda" else model
    start, order, used, step = time.perf_counter(), torch.randperm(len(ids)), 0, 0
    loss = torch.tensor(float("nan"))
    progress = tqdm(total=max_steps or None, desc="training", unit="step")
    while (done := max((time.perf_counter() - start) / seconds, step / max_steps if max_steps else 0.0)) < 1:
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * max(FINAL_SHARE, min(1.0, (1 - done) / 0.5))
        for group in optimizer.param_groups:
            group["lr"] = rate
        if used + batch_size > len(order):
            order, used = torch.randperm(len(ids)), 0
        batch = order[used : used + batch_size].to(ids.device)
        used += batch_size
        tokens, weight = ids[batch].long(), weights[batch][:, 1:].float() * 0.1
        with torch.autocast(device, torch.bfloat16):
            logits = forward(tokens)
        losses = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = (losses.view_as(weight) * weight).sum() / weight.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        progress.update()
        if step % 100 == 0:
            progress.set_postfix(loss=f"{loss.item():.4f}")
    progress.close()
    return loss.item()


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the demo model on synthetic worlds.")
    parser.add_argument("--output-dir", type=Path, required=True, help="model directory to write")
    parser.add_argument("--minutes", type=float, default=9.0, help="training time (default: %(default)s)")
    parser.add_argument("--max-steps", type=int, default=0, help="stop after this many steps, 0 for no limit")
    parser.add_argument("--contexts", type=int, default=240_000, help="worlds to train on (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows in a step (default: %(default)s)")
    parser.add_argument(
        "--tokenizer-dir",
        type=Path,
        default=ROOT / "inputs/demo-model",
        help="where the tokenizer is (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    for name in ("minutes", "contexts", "batch_size"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, not {getattr(args, name)}")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    config = ModelConfig()
    rows = max(1, -(-args.contexts // SHARDS))
    make = partial(
        make_rows, rows=rows, length=config.max_positions, tokenizer_file=str(args.tokenizer_dir / "tokenizer.json")
    )
    seeds = range(FIRST_SEED, FIRST_SEED + min(SHARDS, args.contexts))
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        shards = list(tqdm(pool.imap(make, seeds), total=len(seeds), desc="worlds", unit="shard"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ids = torch.from_numpy(np.concatenate([shard[0] for shard in shards])).to(device)
    weights = torch.from_numpy(np.concatenate([shard[1] for shard in shards])).to(device)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = DemoModel(config).to(device)
    loss = train(model, ids, weights, min(args.batch_size, len(ids)), args.minutes * 60, args.max_steps)
    save_pretrained(model, args.output_dir, args.tokenizer_dir)
    print(f"last loss {loss:.4f}; model in {args.output_dir}")


if __name__ == "__main__":
    main()
