"""Measure a model on data sets: one engine answers the questions in full and by every setting.

`vllm-blend check-model` and `python -m benchmarks.real_text` both do this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm.auto import tqdm

from vllm_blend.pipeline.ask import choose_asking
from vllm_blend.quality.exactness import NUM_QUESTIONS, Check, check_exactness, explain
from vllm_blend.quality.measures import Measured, measure, total_work
from vllm_blend.quality.questions import Questions, joined_ids, select_fitting
from vllm_blend.quality.session import Session
from vllm_blend.quality.settings import Setting

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wording:
    """How questions are asked, as users say it: see `choose_asking`."""

    style: str | None = None
    instruction: str = ""
    template: str = ""


@dataclass(frozen=True)
class Plan:
    """What to measure, and how: the settings, the wording of the questions, how many a data set has at least, how many
    are answered at a time, and with how many it is checked first that recomputing everything is exact."""

    settings: Sequence[Setting]
    wording: Wording = Wording()
    least: int = 1
    batch: int = 16
    num_checked: int = NUM_QUESTIONS


@dataclass(frozen=True)
class Yardstick:
    """What was measured. `reason` says why nothing was: recomputing everything does not give full prefill's answers."""

    measured: list[Measured]
    check: Check
    dtype: str
    device: str
    reason: str | None = None


def measure_model(model: str, data: Sequence[Questions], plan: Plan, say: Say, **engine_args: Any) -> Yardstick:
    """Measure a model on data sets. `say` is told what is asked, and what is left out.

    Raises ValueError or OSError for bad input, such as too few questions that fit the model, and RuntimeError if a
    batch does not fit the engine.
    """
    with Session(model, plan.batch, **engine_args) as session:
        ready = [_ready(session, questions, plan.wording, say) for questions in data]
        check_counts(ready, plan.least)
        tokens = _fit_batch(session, ready, say)
        say(f"checking with {plan.num_checked} questions that recomputing everything is exact")
        check = check_exactness(session, ready[0], plan.num_checked)
        facts = str(session.dtype).removeprefix("torch."), str(session.engine.device)
        if check.passes:
            work = sum(total_work(count, plan.settings) for count in tokens)
            with tqdm(total=work * (1 + 1e-9), desc="measure", unit="token", unit_scale=True, smoothing=0.1) as bar:
                measured = [measure(session, questions, plan.settings, bar.update) for questions in ready]
            return Yardstick(measured, check, *facts)
    return Yardstick([], check, *facts, reason=explain(model, check, **engine_args))


def check_counts(data: Sequence[Questions], least: int) -> None:
    """Raise ValueError for a data set with fewer questions than a verdict takes."""
    for questions in data:
        count = len(questions.samples)
        if count < least:
            raise ValueError(
                f"{questions.name} has {count} {'question' if count == 1 else 'questions'} that can be asked, too few "
                f"for a verdict: give at least {least} (see --samples), or allow fewer with --min-questions {count}"
            )


def _ready(session: Session, questions: Questions, wording: Wording, say: Say) -> Questions:
    """Return the questions as this model is asked them, without those that it cannot hold."""
    tokenizer = session.engine.tokenizer
    asking = choose_asking(tokenizer, questions.path, wording.style, wording.instruction, wording.template)
    found = select_fitting(replace(questions, asking=asking), session.engine)
    without = [f"{len(found.left_out)} are too long"] if found.left_out else []
    without += [f"{found.num_unanswerable} have no answer"] if found.num_unanswerable else []
    left_out = f"; left out: {', '.join(without)}" if without else ""
    say(f"{found.name}: {len(found.samples)} questions, read as {found.form}, asked by {asking.name}{left_out}")
    return found


def _fit_batch(session: Session, data: Sequence[Questions], say: Say) -> list[int]:
    """Have the session take no more prompts at a time than its memory holds. Return the prompt tokens of each data
    set."""
    lengths = [[len(joined_ids(session.engine, q.prompt(sample))) for sample in q.samples] for q in data]
    longest = max(length for own in lengths for length in own)
    asked, session.batch = session.batch, max(1, min(session.batch, session.num_held(longest)))
    if session.batch < asked:
        say(f"{session.batch} prompts at a time, as the memory for KV holds no more of {longest} tokens")
    return [sum(own) for own in lengths]
