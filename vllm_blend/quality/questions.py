"""The questions of a data set, and how they are asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, zip_longest
from pathlib import Path
from typing import Any

from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.datasets import Sample, load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import PromptStyle, build_qa_prompt, find_style
from vllm_blend.quality.arrangements import with_pages

ALL = "all"  # the kind, in results, that stands for every question


@dataclass(frozen=True)
class Questions:
    """The questions of one file. `left_out` names samples that the model cannot hold. With `pages`, prompts say which
    passage continues which, if the data set knows pages."""

    name: str
    style: PromptStyle
    samples: tuple[Sample, ...]
    left_out: tuple[str, ...] = ()
    pages: bool = False

    @property
    def kinds(self) -> list[str]:
        """Return the kinds in the order of the file; none if the file does not say them, or if all are of one kind."""
        kinds = list(dict.fromkeys(sample.kind for sample in self.samples if sample.kind is not None))
        return kinds if len(kinds) > 1 else []

    def prompt(self, sample: Sample) -> ChunkedPrompt:
        """Return the prompt of a sample over all of its passages, in their order."""
        prompt = build_qa_prompt(sample, self.style.name)
        return with_pages(sample, prompt) if self.pages else prompt


def read_questions(path: str | Path, style: str | None = None, limit: int | None = None) -> Questions:
    """Read at most `limit` samples of a file: equally many of each kind, the first ones. `style` is a name of
    PROMPT_STYLES, or None if the file's name holds one.

    Raises FileNotFoundError, or ValueError that names the field and the fix.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the number of samples is {limit}: use 1 or more")
    loaded = load_dataset(path)  # first: a file that is not there has no style either
    found = find_style(style, path)
    samples = [normalize_sample(raw, index) for index, raw in enumerate(loaded)]
    if any(sample.kind == ALL for sample in samples):
        raise ValueError(f"data set {path}: the kind {ALL!r} stands for all questions here: give it another name")
    return Questions(Path(path).stem, found, tuple(_interleave_kinds(samples)[:limit]))


def read_all(paths: Sequence[str | Path], style: str | None = None, limit: int | None = None) -> list[Questions]:
    """Read several files, as `read_questions` does. Raises ValueError too if two have the same name, which results go
    by."""
    data = [read_questions(path, style, limit) for path in paths]
    for index, questions in enumerate(data):
        if questions.name in [other.name for other in data[:index]]:
            raise ValueError(f"two data sets are called {questions.name!r}, as {paths[index]} is: rename a file")
    return data


def select_fitting(questions: Questions, engine: LLMEngine, whole: bool = True) -> Questions:
    """Return the questions without the samples whose prompt and answer exceed the model's length. Raises ValueError if
    none is left of a `whole` data set; a part of one may be empty."""
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
    """Return the token ids of a chunked prompt's pieces, joined. Computes nothing."""
    pieces: Sequence[Any] = [*prompt["chunks"], prompt["suffix"]]
    prefix, ids = engine.identify_chunks(prompt["prefix"], pieces)
    return [*(prefix.token_ids if prefix is not None else ()), *chain.from_iterable(piece.token_ids for piece in ids)]


def place_pieces(engine: LLMEngine, prompt: ChunkedPrompt) -> list[tuple[int, tuple[int, ...]]]:
    """Return where each chunk of a prompt begins, and its token ids; the suffix is the last. Computes nothing."""
    prefix, ids = engine.identify_chunks(prompt["prefix"], [*prompt["chunks"], prompt["suffix"]])
    tokens = [piece.token_ids for piece in ids]
    starts = accumulate((len(piece) for piece in tokens[:-1]), initial=0 if prefix is None else len(prefix.token_ids))
    return list(zip(starts, tokens, strict=True))


def _interleave_kinds(samples: Iterable[Sample]) -> list[Sample]:
    """Return one sample of each kind, then the next of each, in the order of the file."""
    by_kind: dict[str | None, list[Sample]] = {}
    for sample in samples:
        by_kind.setdefault(sample.kind, []).append(sample)
    return [sample for row in zip_longest(*by_kind.values()) for sample in row if sample is not None]
