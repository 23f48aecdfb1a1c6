"""The questions of a data set, and how they are asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.datasets import Sample, load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import PROMPT_STYLES, PromptStyle, build_qa_prompt, prompt_for

ALL = "all"  # of kinds, in results: every question


@dataclass(frozen=True)
class Questions:
    """Of one file. `left_out` names samples that the model cannot hold."""

    name: str
    style: PromptStyle
    samples: tuple[Sample, ...]
    left_out: tuple[str, ...] = ()

    @property
    def kinds(self) -> list[str]:
        """In the order of the file; none where the file does not say them, or all are of one."""
        kinds = list(dict.fromkeys(sample.kind for sample in self.samples if sample.kind is not None))
        return kinds if len(kinds) > 1 else []

    def prompt(self, sample: Sample) -> ChunkedPrompt:
        """Over all of its passages, in their order."""
        return build_qa_prompt(sample, self.style.name)


def read_questions(path: str | Path, style: str | None = None, limit: int | None = None) -> Questions:
    """At most `limit` samples of a file, equally many of each kind, the first of each. `style` is a name of
    PROMPT_STYLES, None where the file's name holds one.

    Raises FileNotFoundError, or ValueError naming the field and the fix.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the number of samples is {limit}: use 1 or more")
    if style is not None and style not in PROMPT_STYLES:
        raise ValueError(f"the style {style!r} is unknown: use one of {', '.join(PROMPT_STYLES)}")
    try:
        found = PROMPT_STYLES[style] if style is not None else prompt_for(path)
    except ValueError as error:
        raise ValueError(
            f"cannot tell how to ask data set {str(path)!r}: its name must contain one of {', '.join(PROMPT_STYLES)}; "
            "rename the file, or give --style"
        ) from error
    samples = [normalize_sample(raw, index) for index, raw in enumerate(load_dataset(path))]
    if any(sample.kind == ALL for sample in samples):
        raise ValueError(f"data set {path}: the kind {ALL!r} stands for all questions here: give it another name")
    return Questions(Path(path).stem, found, tuple(_mixed(samples)[:limit]))


def read_all(paths: Sequence[str | Path], style: str | None = None, limit: int | None = None) -> list[Questions]:
    """As `read_questions`, of several files. ValueError too where two have one name, which results go by."""
    data = [read_questions(path, style, limit) for path in paths]
    for index, questions in enumerate(data):
        if questions.name in [other.name for other in data[:index]]:
            raise ValueError(f"two data sets are called {questions.name!r}, as {paths[index]} is: rename a file")
    return data


def fitting(questions: Questions, engine: LLMEngine, whole: bool = True) -> Questions:
    """Without the samples whose prompt and answer are longer than the model can hold. ValueError if none is left; not
    where they are no `whole` data set, but a part of one."""
    room = engine.max_model_len - questions.style.max_tokens
    kept: list[Sample] = []
    left_out: list[Sample] = []
    for sample in questions.samples:
        fits = len(joined_ids(engine, questions.prompt(sample))) <= room
        (kept if fits else left_out).append(sample)
    if whole and not kept:
        raise nothing_fits(questions, f"{engine.max_model_len} tokens")
    names = tuple(sample.sample_id for sample in left_out)
    return replace(questions, samples=tuple(kept), left_out=names)


def nothing_fits(questions: Questions, room: str) -> ValueError:
    return ValueError(
        f"none of the {len(questions.samples)} samples of {questions.name} fits the model's {room}: use shorter "
        "passages, or a model with a longer context"
    )


def joined_ids(engine: LLMEngine, prompt: ChunkedPrompt) -> list[int]:
    """The token ids that a chunked prompt comes down to. Computes nothing."""
    pieces: Sequence[Any] = [*prompt["chunks"], prompt["suffix"]]
    prefix, ids = engine.identify_chunks(prompt["prefix"], pieces)
    return [*(prefix.token_ids if prefix is not None else ()), *chain.from_iterable(piece.token_ids for piece in ids)]


def _mixed(samples: Iterable[Sample]) -> list[Sample]:
    """One of each kind, then the next of each, in the order of the file."""
    by_kind: dict[str | None, list[Sample]] = {}
    for sample in samples:
        by_kind.setdefault(sample.kind, []).append(sample)
    return [sample for row in zip_longest(*by_kind.values()) for sample in row if sample is not None]
