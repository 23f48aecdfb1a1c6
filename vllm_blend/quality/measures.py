"""What is measured of each way to answer, a number for each question.

F1 and exact match compare with the data set's answers. Agreement and KL compare with full prefill on the same model:
agreement is whether the greedy answer is the same token by token, KL how far the distributions of its tokens are from
full prefill's while both say full prefill's answer, in nats a token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm_blend.inputs import PromptType
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.evaluate import best_score, exact_match, f1_score
from vllm_blend.quality.questions import Questions, joined_ids
from vllm_blend.quality.session import Answer, Following, Session, Truth
from vllm_blend.quality.settings import Setting

FULL, AGAIN = "full prefill", "full prefill, other batches"
LISTS = ("f1", "exact_match", "agreement", "kl", "first_kl")
Progress = Callable[[float], None]  # is told how many prompt tokens' worth of work has been done


@dataclass
class Measures:
    """The measures of one way to answer. `work` is the token-layers of its prefills, with passes that only choose."""

    f1: list[float] = field(default_factory=list)
    exact_match: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    first_kl: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    work: float = 0.0

    def add(self, sample: Sample, text: str, following: Following) -> None:
        """Enter a question's answer."""
        self.f1.append(best_score(f1_score, text, list(sample.answers)))
        self.exact_match.append(best_score(exact_match, text, list(sample.answers)))
        self.agreement.append(float(following.agrees))
        self.kl.append(statistics.fmean(following.kl))
        self.first_kl.append(following.kl[0])
        self.texts.append(text)

    def values(self, name: str) -> np.ndarray:
        return np.asarray(getattr(self, name), np.float64)


@dataclass
class Measured:
    """The measures of a data set: of full prefill, of full prefill in other batches and another order (which differs by
    rounding alone: the noise floor), and of each setting. `encoding` is the token-layers that chunks took, by company.
    """

    questions: Questions
    full: Measures = field(default_factory=Measures)
    again: Measures = field(default_factory=Measures)
    settings: dict[Setting, Measures] = field(default_factory=dict)
    encoding: dict[str, float] = field(default_factory=dict)


def measure(session: Session, questions: Questions, settings: Sequence[Setting], progress: Progress) -> Measured:
    """Answer the questions, which fit the model, in full and by every setting: a batch at a time, so that chunks and
    full prefill's distributions are held for one batch only."""
    measured = Measured(questions, settings={setting: Measures() for setting in settings})
    for start in range(0, len(questions.samples), session.batch):
        _Batch(session, measured, questions.samples[start : start + session.batch], progress).run()
    return measured


class _Batch:
    """Some questions of a data set on their way through everything."""

    def __init__(self, session: Session, measured: Measured, samples: Sequence[Sample], progress: Progress) -> None:
        self.session, self.measured, self.samples, self.progress = session, measured, samples, progress
        questions = measured.questions
        assert questions.asking is not None
        self.max_tokens = questions.asking.max_tokens
        self.prompts = [questions.prompt(sample) for sample in samples]
        ids = [joined_ids(session.engine, prompt) for prompt in self.prompts]
        self.plain: list[PromptType] = [{"prompt_token_ids": each} for each in ids]
        self.tokens = sum(map(len, ids))
        self.truths: list[Truth] = []

    def run(self) -> None:
        self._in_full()
        self._in_full_again()
        for company in dict.fromkeys(setting.company for setting in self.measured.settings):
            self.session.use_company(company)
            self._encode(company)
            for setting, measures in self.measured.settings.items():
                if setting.company == company:
                    self._blend(setting, measures)

    def _in_full(self) -> None:
        self.truths = self.session.truths(self.plain, self.max_tokens)
        full = self.measured.full
        for sample, truth in zip(self.samples, self.truths, strict=True):
            same = Following((0.0,) * len(truth.log_probs), True)
            full.add(sample, truth.answer.text, same)
        full.work += self.session.token_layers
        self.progress(self.tokens)

    def _in_full_again(self) -> None:
        """Answer in full in the opposite order and in smaller batches."""
        order = range(len(self.plain))[::-1]
        prompts, truths = [self.plain[i] for i in order], [self.truths[i] for i in order]
        half = max(1, self.session.batch // 2)
        followings = self.session.follow(prompts, truths, half)[::-1]
        self.measured.again.work += self.session.token_layers
        self._enter(self.measured.again, self.plain, followings)
        self.progress(self.tokens)

    def _encode(self, company: str) -> None:
        done = self.measured.encoding.get(company, 0.0)
        self.measured.encoding[company] = done + self.session.encode(self.prompts)
        self.progress(self.tokens)

    def _blend(self, setting: Setting, measures: Measures) -> None:
        blended: list[Any] = [prompt | setting.prompt for prompt in self.prompts]
        followings = self.session.follow(blended, self.truths)
        measures.work += self.session.token_layers
        self._enter(measures, blended, followings)
        self.progress(self.tokens * expected_work(setting))

    def _enter(self, measures: Measures, prompts: Sequence[PromptType], followings: Sequence[Following]) -> None:
        """Enter what the forced answers showed, and let those prompts answer freely that would say something else."""
        others = [index for index, following in enumerate(followings) if not following.agrees]
        free: dict[int, Answer] = {}
        if others:
            free = dict(zip(others, self.session.answer([prompts[i] for i in others], self.max_tokens), strict=True))
        for index, following in enumerate(followings):
            answer = free.get(index, self.truths[index].answer)
            measures.add(self.samples[index], answer.text, following)


def expected_work(setting: Setting) -> float:
    """Return about how long a setting takes, as a share of full prefill: for the progress bar."""
    return 0.1 + 1.3 * setting.ratio


def total_work(tokens: int, settings: Sequence[Setting]) -> float:
    """Return about how much work there is on prompts of so many tokens, in prompt tokens that are computed."""
    companies = len({setting.company for setting in settings})
    return tokens * (2 + companies + sum(map(expected_work, settings)))
