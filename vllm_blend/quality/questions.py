"""The questions of a data set, and how they are asked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.ask import Asking
from vllm_blend.pipeline.datasets import DataSet, Sample, normalize_sample, read_dataset
from vllm_blend.prompt_parser import parse_prompt


@dataclass(frozen=True)
class Questions:
    """The questions of one file. `left_out` has the ids of samples that the model cannot hold, and `asking` is None
    until the model is known."""

    name: str
    path: Path
    form: str  # of the file
    samples: tuple[Sample, ...]
    num_unanswerable: int = 0
    asking: Asking | None = None
    left_out: tuple[str, ...] = ()

    def prompt(self, sample: Sample) -> ChunkedPrompt:
        assert self.asking is not None
        return self.asking.prompt(sample)


def read_questions(path: str | Path, limit: int | None = None, seed: int = 0) -> Questions:
    """Read the questions of a file: all of them, or `limit` that a seed draws, in the order of the file.

    Raises FileNotFoundError, or ValueError that names the field and the fix.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the number of questions is {limit}: use 1 or more")
    found: DataSet = read_dataset(path)
    samples = [normalize_sample(raw, index) for index, raw in enumerate(found.samples)]
    if limit is not None and limit < len(samples):
        samples = [samples[index] for index in sorted(Random(seed).sample(range(len(samples)), limit))]
    return Questions(Path(path).stem, Path(path), found.format, tuple(samples), found.num_unanswerable)


def read_all(paths: Sequence[str | Path], limit: int | None = None, seed: int = 0) -> list[Questions]:
    """Read several files, as `read_questions` does. Raises ValueError too if two have the same name, which results go
    by."""
    data = [read_questions(path, limit, seed) for path in paths]
    for index, questions in enumerate(data):
        if questions.name in [other.name for other in data[:index]]:
            raise ValueError(f"two data sets are called {questions.name!r}, as {paths[index]} is: rename a file")
    return data


def select_fitting(questions: Questions, engine: LLMEngine) -> Questions:
    """Return the questions without the samples whose prompt and answer exceed the model's length. Raises ValueError if
    none is left."""
    assert questions.asking is not None
    room = engine.max_model_len - questions.asking.max_tokens
    fits = [len(joined_ids(engine, questions.prompt(sample))) <= room for sample in questions.samples]
    kept = tuple(sample for sample, good in zip(questions.samples, fits, strict=True) if good)
    if not kept:
        raise ValueError(
            f"none of the {len(fits)} samples of {questions.name} fits the model's {engine.max_model_len} tokens: use "
            "shorter passages, or a model with a longer context"
        )
    names = tuple(s.sample_id for s, good in zip(questions.samples, fits, strict=True) if not good)
    return replace(questions, samples=kept, left_out=names)


def joined_ids(engine: LLMEngine, prompt: ChunkedPrompt) -> list[int]:
    """Return the token ids of a chunked prompt, of any length: those of the plain prompt with the same text. Computes
    nothing."""
    trusts = engine.config.model.trusted_chunks
    return list(parse_prompt(prompt, engine.tokenizer, engine.hf_config.vocab_size, sys.maxsize, trusts).token_ids)
