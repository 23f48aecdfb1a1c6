"""Measure every run over every question, and share what can be shared: engines, chunks, and full prefill's answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_blend.inputs import ChunkedPrompt, PromptType
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.evaluate import score_prediction
from vllm_blend.quality.arrangements import with_chunks
from vllm_blend.quality.given_tokens import given_tokens
from vllm_blend.quality.questions import Questions, joined_ids, select_fitting
from vllm_blend.quality.session import Answers, Session
from vllm_blend.quality.settings import Run, RunKey

METRICS = ("exact_match", "f1", "rouge_l")
Progress = Callable[[str], None]


@dataclass
class Outcome:
    """The scores of one way to answer the questions of a data set, a number per question, and its costs."""

    exact_match: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    rouge_l: list[float] = field(default_factory=list)
    same_answer: list[float] = field(default_factory=list)  # 1 if it is full prefill's, word for word
    kl: list[float] = field(default_factory=list)  # nats, of the first token, from full prefill
    texts: list[str] = field(default_factory=list)
    token_layers: float = 0.0  # by all prefills
    encoding: float = 0.0  # token-layers that computed this run's chunks

    def values(self, name: str) -> np.ndarray:
        return np.asarray(getattr(self, name), np.float64)


Known = tuple[Outcome, dict[RunKey, Outcome]]  # of a data set: full prefill's, and those of some runs
Done = Callable[[int, Known], None]


@dataclass
class Measured:
    """The measurements on one data set."""

    questions: Questions
    full: Outcome
    runs: dict[RunKey, Outcome]


def sweep(
    model: str,
    data: Sequence[Questions],
    runs: Sequence[Run],
    batch: int = 16,
    progress: Progress = lambda text: None,
    whole: bool = True,
    check: Callable[[Session, list[Questions]], None] = lambda session, data: None,
    known: Mapping[int, Known] | None = None,
    done: Done = lambda index, known: None,
    **engine_args: Any,
) -> Iterator[list[Measured]]:
    """Measure `runs`; after each engine, yield the same list with more in it. Equal runs are measured once.

    The first engine answers everything in full too. Samples that it cannot hold are left out of every run; `check` may
    look at the engine and at the other samples, and raise, before anything is measured. What is `known` of the data set
    of an index is not measured again; what an engine has measured of one is `done`, at once. Raises ValueError if no
    sample is left of a `whole` data set; a part of one may be empty.
    """
    groups: dict[str, dict[RunKey, Run]] = {}
    for run in runs:
        groups.setdefault(run.group, {}).setdefault(run.key, run)
    measured: list[Measured] = []
    references: dict[int, Answers] = {}
    for number, group in enumerate(groups.values()):
        arguments = next(iter(group.values())).engine
        with Session(model, batch, **engine_args | arguments) as session:
            if not measured:
                measured = [
                    Measured(select_fitting(questions, session.engine, whole), Outcome(), {}) for questions in data
                ]
                check(session, [one.questions for one in measured])
                for index, (full, outcomes) in (known or {}).items():
                    measured[index].full = full
                    measured[index].runs.update(outcomes)
            for index, one in enumerate(measured):
                missing = [run for run in group.values() if run.key not in one.runs]
                progress(f"engine {number + 1} of {len(groups)}, {one.questions.name}: {len(missing)} runs")
                if missing and index not in references:
                    references[index] = answer_in_full(session, one)
                for run in missing:
                    one.runs[run.key] = answer_run(session, one.questions, run, references[index], progress)
                if missing:
                    done(index, (one.full, {run.key: one.runs[run.key] for run in missing}))
        yield measured


def kl_divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Return KL(p || q) in nats for log-probabilities [vocabulary]; NaN if they hold one."""
    p, q = p.double(), q.double()
    return float((p.exp() * (p - q)).sum().clamp_min(0.0))  # rounding may leave it just below


def full_answers(session: Session, questions: Questions, samples: Sequence[Sample]) -> Answers:
    """Return full prefill's answers: to the prompts as token ids, without their pieces."""
    prompts: list[PromptType] = [
        {"prompt_token_ids": joined_ids(session.engine, questions.prompt(sample))} for sample in samples
    ]
    return session.answer(prompts, questions.style.max_tokens)


def blended_answers(session: Session, questions: Questions, samples: Sequence[Sample], run: Run) -> Answers:
    """Return a run's answers. A run that keeps some passages alone computes these in full."""
    prompts = [_arrange(questions, sample, run) for sample in samples]
    if run.keep is not None:
        kept = [run.keep(session, s, prompt, run.ratio) for s, prompt in zip(samples, prompts, strict=True)]
        shorter: list[PromptType] = [
            {"prompt_token_ids": joined_ids(session.engine, with_chunks(prompt, own))}
            for prompt, own in zip(prompts, kept, strict=True)
        ]
        return session.answer(shorter, questions.style.max_tokens)
    if run.rank is None:
        return session.answer(prompts, questions.style.max_tokens)
    rankings = [run.rank(session, sample, prompt) for sample, prompt in zip(samples, prompts, strict=True)]
    with given_tokens(rankings, run.levers, run.damping) as selectors:
        ranked = [p | {"blend_selector": selector} for p, selector in zip(prompts, selectors, strict=True)]
        return session.answer(ranked, questions.style.max_tokens)


def answer_in_full(session: Session, one: Measured) -> Answers:
    """Let full prefill answer everything, enter its scores into `one`, and return its answers."""
    found = full_answers(session, one.questions, one.questions.samples)
    one.full = _outcome(one.questions, found, found)
    return found


def answer_run(session: Session, questions: Questions, run: Run, reference: Answers, progress: Progress) -> Outcome:
    """Return the outcome of a run over all questions."""
    found = blended_answers(session, questions, questions.samples, run)
    outcome = _outcome(questions, found, reference)
    report_run(questions, run, outcome, progress)
    return outcome


def report_run(questions: Questions, run: Run, outcome: Outcome, progress: Progress) -> None:
    metric = questions.style.metric
    if questions.samples:
        score = outcome.values(metric).mean()
        progress(f"  {run.setting.name} at {100 * run.ratio:g}%: {metric} {100 * score:.1f}")


def _arrange(questions: Questions, sample: Sample, run: Run) -> ChunkedPrompt:
    prompt = questions.prompt(sample)
    if run.setting.arrange is not None:
        prompt = run.setting.arrange(sample, prompt)
    return prompt | run.prompt  # type: ignore[return-value]


def _outcome(questions: Questions, found: Answers, reference: Answers) -> Outcome:
    outcome = Outcome(token_layers=found.token_layers, encoding=found.encoding)
    for sample, answer, full in zip(questions.samples, found.answers, reference.answers, strict=True):
        scores = score_prediction(answer.text, list(sample.answers))
        for name in METRICS:
            getattr(outcome, name).append(getattr(scores, name))
        outcome.texts.append(answer.text)
        outcome.same_answer.append(float(answer.text == full.text))
        outcome.kl.append(kl_divergence(full.first, answer.first))
    return outcome
