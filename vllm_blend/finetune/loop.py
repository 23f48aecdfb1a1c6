"""The training loop: a model of transformers, rows that arrive while it runs, until the minutes or the steps are up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import TimeoutError as NotYet
from typing import Any

import torch

from vllm_blend.finetune.attention import reuse_arguments
from vllm_blend.finetune.losses import Outcome, Taught, accuracies, head_input, weighted_loss
from vllm_blend.finetune.masks import Reuse, draw_reuse
from vllm_blend.finetune.plan import TrainingPlan
from vllm_blend.finetune.replicas import ALONE, Replicas
from vllm_blend.finetune.rows import RowBatch, RowPools, Rows
from vllm_blend.finetune.state import TrainingState, restore
from vllm_blend.finetune.teacher import Teacher

FIRST_BATCHES = 8  # batches of rows to begin with, while more are being made
BETAS = (0.9, 0.95)
LONGEST_GRADIENT = 1.0
REPLICA_SEEDS = 1_000_003  # from one replica's random masks to the next one's
MOST_GRAPHS = 64  # of a compiled layer: one for each length of rows, with and without masks, gradients and adapter


@dataclass(frozen=True)
class TrainingProgress:
    """The state after `step` steps. `accuracy` is that of answer tokens in the last batch, by kind of mask in it;
    `development` that of the development rows, when they were last asked. `ended` says why training is over."""

    step: int
    seconds: float
    loss: float
    accuracy: dict[str, float]
    development: dict[str, float] = field(default_factory=dict)
    ended: str = ""

    def __str__(self) -> str:
        line = f"step {self.step}  {self.seconds:.0f} s  loss {self.loss:.4f}  answer tokens right: "
        line += _percent(self.accuracy)
        return line + (f"  development: {_percent(self.development)}" if self.development else "")


def _percent(shares: dict[str, float]) -> str:
    return ", ".join(f"{kind} {100 * share:.1f}%" for kind, share in shares.items())


@dataclass(frozen=True)
class Surroundings:
    """The functions that a training run calls: to report its progress, to keep checkpoints, and to ask the development
    rows. `save` is called every `save_minutes` and at a pause, but not at the end."""

    report: Callable[[TrainingProgress], None]
    save: Callable[[TrainingState], None] = lambda state: None
    evaluate: Callable[[], dict[str, float]] | None = None


def train(
    model: Any,
    pools: RowPools,
    arriving: Iterator[Rows],
    plan: TrainingPlan,
    around: Surroundings,
    teacher: Teacher | None = None,
    resumed: TrainingState | None = None,
    replicas: Replicas = ALONE,
) -> TrainingProgress:
    """Train a causal model of transformers in place, on its device; parameters without gradients stay as they are. Each
    of several replicas calls it with rows of its own; the loss that is reported is that of all, the accuracy rank 0's.

    On a GPU, products are computed in bfloat16; what is trained, and the optimizer, are float32 (the model must be).
    Raises ValueError if the loss of a step that is reported or saved is not finite.
    """
    device = model.device
    prepare(model, plan, device)
    if resumed is not None:
        restore(resumed, model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    replicas.begin_alike(trained)
    optimizer = _optimizer(trained, plan, fused=device.type == "cuda")
    step, earlier = 0, 0.0
    if resumed is not None:
        optimizer.load_state_dict(resumed.optimizer)
        step, earlier, pools.received = resumed.step, resumed.seconds, resumed.rows
    drawing = torch.Generator(device).manual_seed(plan.seed + step + REPLICA_SEEDS * replicas.rank)
    all_here = _receive(pools, arriving, FIRST_BATCHES)
    start = saved = time.perf_counter()
    progress, development, ended = TrainingProgress(step, earlier, float("nan"), {}), dict[str, float](), ""

    def state() -> TrainingState:
        own = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        seconds = time.perf_counter() - start + earlier
        return TrainingState(step, seconds, pools.received, plan, own, optimizer.state_dict())

    while not ended:
        if not all_here:
            all_here = _receive(pools, arriving)
        done = replicas.agree(plan.done(time.perf_counter() - start + earlier, step))
        for group in optimizer.param_groups:
            group["lr"] = plan.rate(step, done)
        batch = pools.draw(shortest=done < plan.short_share)
        reuse = None if plan.shares is None else draw_reuse(batch, plan.shares, drawing)
        optimizer.zero_grad(set_to_none=True)
        loss, right = _gradients(model, batch, reuse, plan, teacher)
        replicas.average(trained)
        torch.nn.utils.clip_grad_norm_(trained, LONGEST_GRADIENT)
        optimizer.step()
        step += 1
        here = replicas.agree(time.perf_counter() - start)
        if plan.done(here + earlier, step) >= 1:
            ended = "the limit is reached"
        elif plan.pause_minutes is not None and here > 60 * plan.pause_minutes:
            ended = "paused"
        if around.evaluate is not None and (ended or step % plan.evaluate_steps == 0):
            development = around.evaluate()
            if plan.target is not None and replicas.agree(min(development.values())) >= plan.target:
                ended = "the target is reached on the development rows"
        if ended or step % plan.log_steps == 0 or step in (1, 10):
            right_by_kind = accuracies(right, batch.answers, None if reuse is None else reuse.kinds)
            shared = replicas.mean(loss.item())
            progress = TrainingProgress(step, here + earlier, shared, right_by_kind, development, ended)
            if replicas.leads:
                around.report(progress)
            _check_loss(progress.loss, step)
        due = plan.save_minutes is not None and time.perf_counter() - saved > 60 * plan.save_minutes
        if replicas.leads and (ended == "paused" or (due and not ended)):
            _check_loss(loss.item(), step)
            around.save(state())
            saved = time.perf_counter()
    return progress


def prepare(model: Any, plan: TrainingPlan, device: torch.device) -> None:
    """Set the model up for training on its device, as the plan says."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward needs queries as wide as values
    if plan.checkpoint_activations:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if plan.compile:
        compile_layers(model)
    model.train()


def compile_layers(model: Any) -> None:
    """Compile the decoder's layers in place. They are all alike, so that one compilation serves them all; it takes
    seconds, also for rows of another length."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MOST_GRAPHS)
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def hidden_states(model: Any, batch: RowBatch, reuse: Reuse | None) -> torch.Tensor:
    """Return the last hidden states [rows, length, hidden size] of the rows' own tokens, for the head."""
    arguments: dict[str, Any] = {"input_ids": batch.ids}
    if reuse is not None:
        mask_dtype = torch.bfloat16 if batch.ids.device.type == "cuda" else torch.float32
        arguments = reuse_arguments(model, batch.ids, batch.chunks, reuse, mask_dtype)
    states: torch.Tensor = model.model(use_cache=False, **arguments).last_hidden_state
    return head_input(model, states[:, : batch.ids.shape[1]])


def in_half(device: torch.device) -> torch.autocast:
    """Return a context in which products are computed in bfloat16, on a GPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _gradients(
    model: Any, batch: RowBatch, reuse: Reuse | None, plan: TrainingPlan, teacher: Teacher | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the gradients of a batch, part by part; return its mean loss, and which tokens were right (`Outcome`)."""
    rows, total, outcomes = len(batch.ids), batch.weights[:, 1:].sum(), list[Outcome]()
    each = -(-rows // plan.accumulate)
    for first in range(0, rows, each):
        part = slice(first, first + each)
        asked, reused = batch.part(part), None if reuse is None else reuse.part(part)
        with in_half(batch.ids.device):
            taught = None if teacher is None else Taught(teacher.hidden(asked), teacher.head, plan.distill)
            outcome = weighted_loss(hidden_states(model, asked, reused), model.get_output_embeddings(), asked, taught)
        (outcome.loss / total).backward()
        outcomes.append(Outcome(outcome.loss.detach(), outcome.right))
    loss = torch.stack([outcome.loss for outcome in outcomes]).sum() / total
    return loss, torch.cat([outcome.right for outcome in outcomes])


def _check_loss(loss: float, step: int) -> None:
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss is {loss} after {step} steps, and the model is ruined: lower --learning-rate, or raise "
            "--warmup-steps"
        )


def _optimizer(trained: Sequence[torch.Tensor], plan: TrainingPlan, fused: bool) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": plan.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=plan.learning_rate, betas=BETAS, fused=fused)


def _receive(pools: RowPools, arriving: Iterator[Rows], batches: int = 0) -> bool:
    """Put the rows that have arrived into the pools, and wait until each has this many batches; return whether all have
    come."""
    ready = getattr(arriving, "next", None)  # a pool of processes has it; other iterators make rows on demand
    while True:
        try:
            pools.add(next(arriving) if ready is None or not pools.have(batches) else ready(timeout=0))
        except NotYet:
            return False
        except StopIteration:
            return True
