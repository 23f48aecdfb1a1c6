"""`vllm-blend finetune --measure-only`: what training a model of some shape takes, without its weights or any data."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from vllm_blend.finetune import attention
from vllm_blend.finetune.loop import Surroundings, TrainingProgress, compile_layers, train
from vllm_blend.finetune.lora import Adapter
from vllm_blend.finetune.losses import logits_at_once
from vllm_blend.finetune.plan import TrainingPlan
from vllm_blend.finetune.rows import LENGTH_MULTIPLE, Row, RowPool, RowPools, pad_rows
from vllm_blend.finetune.teacher import FrozenModel, Teacher, WithoutAdapter
from vllm_blend.kv_store.host_memory import available_bytes

CHUNKS, ANSWER_TOKENS = 8, 32  # of each measured prompt
LOGITS_COPIES = 5  # tensors as large as the logits: those, their logarithms, their gradients, the teacher's
HEAD_COPIES = 3  # tensors as large as the head on a CPU: its gradient of some tokens, and AdamW's temporary ones
SCORES_COPIES = 3  # of one layer's attention scores on a CPU, beside what is kept for the backward pass
FLOAT, HALF = 4, 2  # bytes


@dataclass(frozen=True)
class Estimate:
    """Bytes that training takes, by a formula. docs/finetune.md derives it; `measure` tells what it really is."""

    weights: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return self.weights + self.activations + self.logits


def estimate(
    config: Any, plan: TrainingPlan, length: int, parameters: int, trained: int, on_gpu: bool = True
) -> Estimate:
    """Return the bytes of weights (with gradients, optimizer, and the copies in half precision that a step on a GPU
    makes), activations and logits, for rows of `length` tokens. A CPU computes in float32, and keeps the scores of
    attention over rows that reuse chunks."""
    whole, size = trained == parameters, HALF if on_gpu else FLOAT
    weights = trained * 4 * FLOAT
    weights += parameters * HALF if on_gpu else (parameters - trained) * FLOAT
    weights += parameters * size if whole and plan.distill else 0  # the teacher
    weights += 0 if on_gpu or not whole else HEAD_COPIES * config.vocab_size * config.hidden_size * FLOAT
    slots = length + (0 if plan.shares is None else plan.shares.recompute_slots(length))
    rows = plan.batch_size // plan.accumulate
    hidden, mlp, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    stream = slots * rows * hidden * (FLOAT if whole else size)  # a layer's input
    scores = 0 if on_gpu or plan.shares is None else rows * config.num_attention_heads * slots * slots * FLOAT
    layer = slots * rows * size * (16 * hidden + 4 * mlp) + scores
    activations = layers * stream + layer if plan.checkpoint_activations else layers * (stream + layer)
    activations += SCORES_COPIES * scores + rows * slots * slots * size  # and the mask
    logits = min(logits_at_once(on_gpu), rows * length * config.vocab_size) * FLOAT * LOGITS_COPIES
    return Estimate(float(weights), float(activations), float(logits))


def fit_to_memory(
    config: Any,
    plan: TrainingPlan,
    length: int,
    with_adapter: bool,
    device: torch.device,
    checkpoint: bool | None = None,
    parts: int | None = None,
) -> TrainingPlan:
    """Return the plan with what saves memory where the estimate is above half of what is free: activations are computed
    again, and then a batch is computed in parts, as few as it takes. With `checkpoint` or `parts` that is decided
    already.

    Raises ValueError if even that is more than a CPU has free: the system would end the process without a word. A GPU's
    own error says what it lacks.
    """
    again = [False, True] if checkpoint is None else [checkpoint]
    divisors = [n for n in range(1, plan.batch_size + 1) if plan.batch_size % n == 0] if parts is None else [parts]
    # Computing activations again costs a third more time, and parts hardly any, but on a GPU small ones are slow.
    choices = [(again[0], divisors[0]), *((again[-1], n) for n in divisors)]
    plans = [replace(plan, checkpoint_activations=one, accumulate=n) for one, n in choices]
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_bytes()
    if free is None:
        return plans[0]
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    trained = 0 if with_adapter else parameters
    needed = [estimate(config, one, length, parameters, trained, device.type == "cuda") for one in plans]
    for one, bytes_ in zip(plans, needed, strict=True):
        if bytes_.total <= free / 2:
            return one
    found, chosen = needed[-1], plans[-1]
    if device.type == "cpu" and found.total > free:
        rows = chosen.batch_size // chosen.accumulate
        fewer = "" if rows == 1 else f"compute fewer than {rows} rows at a time (--batch-size, --accumulate), "
        raise ValueError(
            f"training takes about {found.total / 1e9:.1f} GB (weights and optimizer {found.weights / 1e9:.1f}, "
            f"activations {found.activations / 1e9:.1f}, logits {found.logits / 1e9:.1f}), and {free / 1e9:.1f} GB are "
            f"free: {fewer}shorten rows of {length} tokens (--max-length), or train an adapter (--lora-rank)"
        )
    return chosen


def measure(config: Any, plan: TrainingPlan, length: int, lora_rank: int, lora_alpha: int, device: torch.device) -> str:
    """Train a model of random weights on random prompts of `length` tokens for the plan's steps; return a report.

    `config` is a configuration of transformers. The first two steps are not timed: they compile and allocate.
    """
    attention.register()
    on_gpu = device.type == "cuda"
    before = 0 if on_gpu else _peak_of_process()
    dtype = torch.bfloat16 if lora_rank and on_gpu else torch.float32
    model = random_model(config, dtype, device)
    adapter = Adapter(model, lora_rank, lora_alpha) if lora_rank else None
    teacher: Teacher | None = None
    if plan.distill and adapter is not None:
        teacher = WithoutAdapter(model, adapter)
    elif plan.distill:
        other = random_model(config, torch.bfloat16 if on_gpu else torch.float32, device)
        if plan.compile:
            compile_layers(other)
        teacher = FrozenModel(other)
    length -= length % LENGTH_MULTIPLE
    rows = pad_rows([random_row(length, config.vocab_size, seed) for seed in range(plan.batch_size)], length, 0)
    pools = RowPools([RowPool(plan.batch_size, length, device, 0)], [1.0], plan.batch_size, 0)
    seen: list[TrainingProgress] = []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    train(model, pools, iter([rows]), replace(plan, log_steps=1), Surroundings(seen.append), teacher)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in model.parameters())
    return _report(config, plan, length, parameters, trained, [p.seconds for p in seen], on_gpu, before)


def random_model(config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a causal model with random weights, made on its device."""
    with device:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    return model.to(device)


def random_row(length: int, vocabulary: int, seed: int) -> Row:
    """Return a row of random tokens: a short prefix, some chunks, and at its end a question with an answer."""
    rng = Random(seed)
    prefix, suffix = max(1, length // 64), max(ANSWER_TOKENS + 1, length // 16)
    chunked = max(CHUNKS, length - prefix - suffix)
    numbers = [0] * prefix + [1 + i * CHUNKS // chunked for i in range(chunked)]
    numbers = (numbers + [-1] * length)[:length]
    weights = [5] * (length - ANSWER_TOKENS) + [10] * ANSWER_TOKENS
    return Row([rng.randrange(vocabulary) for _ in range(length)], weights[-length:], numbers)


def _peak_of_process() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _report(
    config: Any,
    plan: TrainingPlan,
    length: int,
    parameters: int,
    trained: int,
    ends: Sequence[float],
    on_gpu: bool,
    before: int,
) -> str:
    steps = [after - before for before, after in pairwise(ends)]
    seconds = median(steps[1:] or steps or ends)
    if on_gpu:
        peak, of = torch.cuda.max_memory_allocated(), "allocated on the GPU"
    else:
        peak, of = _peak_of_process() - before, f"of this process, beside {before / 1e9:.1f} GB of the program itself"
    guess = estimate(config, plan, length, parameters, trained, on_gpu)
    tokens = plan.batch_size * length
    return "\n".join(
        [
            f"{config.model_type}: {parameters / 1e9:.2f}B parameters, {trained / 1e6:.1f}M trained",
            f"{plan.batch_size} prompts of {length} tokens a step, in {plan.accumulate} parts",
            f"measured: first step {ends[0]:.1f} s, later {seconds:.2f} s: {tokens / seconds:,.0f} tokens/s",
            f"measured: peak memory {of}: {peak / 1e9:.1f} GB",
            f"estimated: {guess.total / 1e9:.1f} GB (weights and optimizer {guess.weights / 1e9:.1f}, "
            f"activations {guess.activations / 1e9:.1f}, logits {guess.logits / 1e9:.1f})",
        ]
    )
