"""The input of stages 2 and 3: samples with their passages as named chunks, ordered by stage 1 if it has run."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_blend.checks import is_number
from vllm_blend.pipeline.ask import Asking, choose_asking
from vllm_blend.pipeline.config import WORDING, RetrievalConfig, make_section
from vllm_blend.pipeline.datasets import Sample, SamplePassage, load_dataset, normalize_sample
from vllm_blend.pipeline.files import check_file_name, is_json_lines, read_json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PassageChunk:
    """A passage as a chunk. `chunk_id` names its folder in a KV cache directory; `position` orders all passages.
    `page_before` are the passages of its sample that precede it on its page, none if the data set knows no pages."""

    chunk_id: str
    passage: SamplePassage
    text: str  # as it stands in a prompt
    position: tuple[int, int]  # (sample, passage) in the data set
    page_before: tuple[PassageChunk, ...] = field(default=(), compare=False, repr=False)

    @property
    def text_before(self) -> str:
        """Return the text that precedes it on its page."""
        return "".join(chunk.text for chunk in self.page_before)


@dataclass(frozen=True)
class StageSample:
    """A sample, its own passages in order, and the retrieved ones, best first; None if nothing was retrieved yet.
    `scores` are those of the retrieved ones, None if the retrieval gave none."""

    sample: Sample
    chunks: tuple[PassageChunk, ...]
    retrieved: tuple[PassageChunk, ...] | None
    scores: tuple[float, ...] | None = None

    def best(self, count: int) -> tuple[PassageChunk, ...]:
        """Return the first `count` chunks: as retrieved, else in the order of the data set."""
        return (self.chunks if self.retrieved is None else self.retrieved)[:count]

    def relevance(self, chunks: Sequence[PassageChunk]) -> list[float | None] | None:
        """Return the retrieval's score of each chunk, None for those that it did not find; None if there are no scores
        of these chunks."""
        if self.retrieved is None or self.scores is None:
            return None
        score_of = dict(zip(self.retrieved, self.scores, strict=True))
        scores = [score_of.get(chunk) for chunk in chunks]
        return None if all(score is None for score in scores) else scores


@dataclass(frozen=True)
class StageInput:
    """The samples of a data set. `source` is the file they were read from."""

    dataset_name: str
    source: Path
    asking: Asking
    samples: tuple[StageSample, ...]

    @property
    def prefix_id(self) -> str:
        """Return the name of the folder of the instruction's KV."""
        return f"{self.dataset_name}_prefix"

    def check_scores(self) -> None:
        """Raise ValueError unless every sample has the retrieval's scores, which the order "free" goes by."""
        for each in self.samples:
            if each.scores is None:
                raise ValueError(
                    f"order free needs the retrieval's scores, but {self.source} has none for "
                    f"{each.sample.sample_id}: run the retrieval stage first, or leave order out"
                )


def read_stage_input(
    retrieval: RetrievalConfig,
    retrieval_json: str,
    max_samples: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> StageInput:
    """Read stage 1's output, by default from where `retrieval` says that it is written. Questions are asked by the
    tokenizer's chat template, if it has one and `retrieval` names no style.

    If it has not been written there, the data set itself is read and nothing counts as retrieved. Raises
    FileNotFoundError, or ValueError that names the sample, the field and the fix.
    """
    source = Path(retrieval_json) if retrieval_json else retrieval.output_path
    if not retrieval_json and not source.is_file():
        logger.warning("%s does not exist: no passages count as retrieved (run the retrieval stage first)", source)
        source = retrieval.input_path
    raw = load_dataset(source)
    written = _written_config(source)
    name = _dataset_name(source, written, retrieval)
    asking = find_asking(_worded(retrieval, written, source), name, tokenizer)
    views = [normalize_sample(sample, i, retrieval.page_id_key) for i, sample in enumerate(raw)]
    own = [_own_chunks(name, view, i, asking) for i, view in enumerate(views)]
    by_text = {chunk.text: chunk for chunks in reversed(own) for chunk in reversed(chunks)}
    samples = []
    for i, (view, chunks, sample) in enumerate(zip(views, own, raw, strict=True)):
        mine = by_text | {chunk.text: chunk for chunk in reversed(chunks)}
        found = _retrieved(sample, i, mine, source, asking)
        scores = None if found is None else _known_scores(list(found.values()), source, i)
        samples.append(StageSample(view, tuple(chunks), None if found is None else tuple(found), scores))
    return StageInput(name, source, asking, tuple(samples[: max_samples or None]))


def find_asking(
    retrieval: RetrievalConfig, dataset_name: str, tokenizer: PreTrainedTokenizerBase | None = None
) -> Asking:
    """Return how a data set is asked: in the section's style, by the tokenizer's chat template, or else as its name
    says; in the section's words, if it has any. Raises ValueError that lists the styles if nothing says it."""
    return choose_asking(
        tokenizer, dataset_name, retrieval.dataset_style or None, retrieval.instruction, retrieval.template
    )


def _written_config(source: Path) -> dict[str, Any]:
    """Return the settings in stage 1's output; none in a data set itself."""
    data = None if is_json_lines(source) else read_json(source, "retrieval output")
    config = data.get("config") if isinstance(data, dict) else None
    return config if isinstance(config, dict) else {}


def _worded(retrieval: RetrievalConfig, written: Mapping[str, Any], source: Path) -> RetrievalConfig:
    """Return the section with the wording that stage 1 was given, where this stage is given none."""
    known = {name: getattr(retrieval, name) or written.get(name, "") for name in WORDING}
    try:
        return make_section(RetrievalConfig, "config", {**asdict(retrieval), **known})
    except ValueError as error:
        raise ValueError(f"{source}: {error}; run the retrieval stage again") from error


def _dataset_name(source: Path, written: Mapping[str, Any], retrieval: RetrievalConfig) -> str:
    named = written.get("dataset_name")
    if not (isinstance(named, str) and named):
        return retrieval.dataset_name
    check_file_name(f"{source}: config.dataset_name", named)
    return named


def page_predecessors(chunks: Sequence[PassageChunk]) -> list[int | None]:
    """Return the `continues` of a prompt of these chunks: for each, the number of the last one before it that also
    precedes it on its page; None if there is none."""
    return [
        max((i for i, other in enumerate(chunks[:number]) if other in chunk.page_before), default=None)
        for number, chunk in enumerate(chunks)
    ]


def _own_chunks(dataset_name: str, sample: Sample, index: int, asking: Asking) -> list[PassageChunk]:
    # Samples without an id are called sample0, sample1, ... in every file: the data set's name keeps them apart.
    prefix = "" if sample.sample_id.startswith(dataset_name) else f"{dataset_name}-"
    chunks: list[PassageChunk] = []
    pages: dict[str, tuple[PassageChunk, ...]] = {}
    for i, passage in enumerate(sample.passages):
        before = () if passage.page_id is None else pages.get(passage.page_id, ())
        text = asking.passage(passage.title, passage.text)
        chunks.append(PassageChunk(f"{prefix}{sample.chunk_id(i)}", passage, text, (index, i), before))
        if passage.page_id is not None:
            pages[passage.page_id] = (*before, chunks[-1])
    return chunks


def _retrieved(
    sample: Mapping[str, Any], index: int, by_text: Mapping[str, PassageChunk], source: Path, asking: Asking
) -> dict[PassageChunk, Any] | None:
    """Return the retrieved chunks, best first, each with what the file has as its score; None if nothing was retrieved
    yet."""
    hits = sample.get("retrieved")
    if hits is None:
        return None
    if not isinstance(hits, Sequence) or isinstance(hits, str):
        raise ValueError(f"{source}: sample {index}: retrieved must be a list; run the retrieval stage again")
    found: dict[PassageChunk, Any] = {}
    for i, hit in enumerate(hits):
        try:
            text = asking.passage(hit["title"], hit["text"])
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{source}: sample {index}: retrieved[{i}] must have a title and a text") from error
        if text not in by_text:
            raise ValueError(
                f"{source}: sample {index}: retrieved[{i}] is not a passage of these samples; "
                "run the retrieval stage again"
            )
        found.setdefault(by_text[text], hit.get("score"))
    return found


def _known_scores(scores: list[Any], source: Path, index: int) -> tuple[float, ...] | None:
    """Return the scores of retrieved chunks; None if the file has none. Raises ValueError unless all are finite."""
    if all(score is None for score in scores):
        return None
    for score in scores:
        if not is_number(score) or not math.isfinite(score):
            raise ValueError(
                f"{source}: sample {index}: retrieved has the score {score!r}, which is no finite number; run the "
                "retrieval stage again, or leave all scores of the sample out"
            )
    return tuple(map(float, scores))
