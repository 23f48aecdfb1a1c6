"""Every run over every question, with everything shared that can be: engines, chunks, what full prefill answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vllm_blend.inputs import ChunkedPrompt, PromptType
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.evaluate import score_prediction
from vllm_blend.pipeline.quality.questions import Questions, fitting, joined_ids
from vllm_blend.pipeline.quality.session import Answer, Answers, Session
from vllm_blend.pipeline.quality.settings import Run

METRICS = ("exact_match", "f1", "rouge_l")
Progress = Callable[[str], None]


@dataclass
class Outcome:
    """Of one way to answer the questions of a data set, a number per question each."""

    exact_match: list[float] = field(default_factory=list)
    f1: list[float] = field(default_factory=list)
    rouge_l: list[float] = field(default_factory=list)
    same_answer: list[float] = field(default_factory=list)  # word for word full prefill's own
    kl: list[float] = field(default_factory=list)  # nats, of the first token: from full prefill to this
    token_layers: float = 0.0  # of all prefills
    encoding: float = 0.0  # token-layers that this run computed chunks with

    def values(self, name: str) -> np.ndarray:
        return np.asarray(getattr(self, name), np.float64)


@dataclass
class Measured:
    """What was measured on one data set."""

    questions: Questions
    full: Outcome
    runs: dict[tuple[str, str, int], Outcome]  # by `Run.key`


@dataclass(frozen=True)
class Reference:
    """Full prefill's answers to a data set."""

    texts: list[str]
    first: list[torch.Tensor]  # [vocabulary] float32 log-probabilities each


def sweep(
    model: str,
    data: Sequence[Questions],
    runs: Sequence[Run],
    batch: int = 16,
    progress: Progress = lambda text: None,
    whole: bool = True,
    **engine_args: Any,
) -> Iterator[list[Measured]]:
    """Measure `runs`; the same list, with more in it, after each engine. Equal runs are measured once.

    The first engine answers everything in full too. Samples that it cannot hold are left out, of every run; ValueError
    if none is left of a data set, unless these are but parts of data sets, not `whole` ones: those may be empty.
    """
    groups: dict[str, dict[tuple[str, str, int], Run]] = {}
    for run in runs:
        groups.setdefault(run.group, {}).setdefault(run.key, run)
    measured: list[Measured] = []
    references: list[Reference] = []
    for number, group in enumerate(groups.values()):
        arguments = next(iter(group.values())).engine
        with Session(model, batch, **engine_args | arguments) as session:
            if not measured:
                measured = [Measured(fitting(questions, session.engine, whole), Outcome(), {}) for questions in data]
            for index, one in enumerate(measured):
                progress(f"engine {number + 1} of {len(groups)}, {one.questions.name}: {len(group)} runs")
                if number == 0:
                    references.append(answer_in_full(session, one))
                for run in group.values():
                    one.runs[run.key] = answer_run(session, one.questions, run, references[index], progress)
        yield measured


def kl_divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL(p || q) in nats, of log-probabilities [vocabulary]; NaN where they hold one."""
    p, q = p.double(), q.double()
    return float((p.exp() * (p - q)).sum().clamp_min(0.0))  # rounding may leave it just below


def in_full(session: Session, questions: Questions, samples: Sequence[Sample]) -> Answers:
    """Full prefill's answers: the prompts without their pieces."""
    prompts: list[PromptType] = [
        {"prompt_token_ids": joined_ids(session.engine, questions.prompt(sample))} for sample in samples
    ]
    return session.answer(prompts, questions.style.max_tokens)


def blended(session: Session, questions: Questions, samples: Sequence[Sample], run: Run) -> Answers:
    prompts: list[PromptType] = [_arranged(questions, sample, run) for sample in samples]
    return session.answer(prompts, questions.style.max_tokens)


def answer_in_full(session: Session, one: Measured) -> Reference:
    """Have full prefill answer everything; its scores are entered."""
    found = in_full(session, one.questions, one.questions.samples)
    reference = Reference([a.text for a in found.answers], [a.first for a in found.answers])
    one.full = _outcome(one.questions, found, reference)
    return reference


def answer_run(session: Session, questions: Questions, run: Run, reference: Reference, progress: Progress) -> Outcome:
    """What a run makes of all questions."""
    found = blended(session, questions, questions.samples, run)
    outcome = _outcome(questions, found, reference)
    report_run(questions, run, outcome, progress)
    return outcome


def report_run(questions: Questions, run: Run, outcome: Outcome, progress: Progress) -> None:
    metric = questions.style.metric
    if questions.samples:
        score = outcome.values(metric).mean()
        progress(f"  {run.setting.name} at {100 * run.ratio:g}%: {metric} {100 * score:.1f}")


def _arranged(questions: Questions, sample: Sample, run: Run) -> ChunkedPrompt:
    prompt = questions.prompt(sample)
    if run.setting.arrange is not None:
        prompt = run.setting.arrange(sample, prompt)
    return prompt | run.prompt  # type: ignore[return-value]


def _outcome(questions: Questions, found: Answers, reference: Reference) -> Outcome:
    outcome = Outcome(token_layers=found.token_layers, encoding=found.encoding)
    rows = zip(questions.samples, found.answers, reference.texts, reference.first, strict=True)
    for sample, answer, text, first in rows:
        _add(outcome, sample, answer, text, first)
    return outcome


def _add(outcome: Outcome, sample: Sample, answer: Answer, text: str, first: torch.Tensor) -> None:
    scores = score_prediction(answer.text, list(sample.answers))
    for name in METRICS:
        getattr(outcome, name).append(getattr(scores, name))
    outcome.same_answer.append(float(answer.text == text))
    outcome.kl.append(kl_divergence(first, answer.first))
