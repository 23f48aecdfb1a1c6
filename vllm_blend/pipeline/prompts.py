"""Prompts of the data sets, in pieces: an instruction, the passages as chunks, and the question with an open answer.

The wording is exactly what the demo model was trained on. A prompt is {"prefix", "chunks", "suffix"}, which
`LLM.generate` takes as it is: pieces are tokenized one by one, so a chunk has the same token ids wherever it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.dialogues import SAMSUM_INSTRUCTION
from vllm_blend.pipeline.worlds import MUSIQUE_INSTRUCTION, WIKIMQA_INSTRUCTION, render_passage

if TYPE_CHECKING:
    from vllm_blend.inputs import ChunkedPrompt


@dataclass(frozen=True)
class PromptStyle:
    """How a data set is asked and scored. An answer ends with a newline; `max_tokens` is the room it needs."""

    name: str
    instruction: str
    max_tokens: int
    metric: str  # "f1" or "rouge_l": the score that papers report on this data set

    def suffix(self, question: str) -> str:
        """The question, open for the answer: "Question: ...\\nAnswer:", or the dialogue with "Summary:" after it."""
        if self.name != "samsum":
            return f"Question: {question.strip()}\nAnswer:"
        dialogue = question.strip().removesuffix("Summary:").rstrip()
        return ("" if dialogue.startswith("Dialogue:") else "Dialogue: ") + f"{dialogue}\nSummary:"


PROMPT_STYLES = {
    style.name: style
    for style in (
        PromptStyle("musique", MUSIQUE_INSTRUCTION, max_tokens=24, metric="f1"),
        PromptStyle("wikimqa", WIKIMQA_INSTRUCTION, max_tokens=24, metric="f1"),
        PromptStyle("samsum", SAMSUM_INSTRUCTION, max_tokens=48, metric="rouge_l"),
    )
}


def prompt_for(dataset: str | Path) -> PromptStyle:
    """The style of a data set, by name ("musique") or by a file name that contains it ("inputs/musique_s.json").

    Raises ValueError listing the known styles.
    """
    stem = Path(dataset).stem.lower()
    found = [style for name, style in PROMPT_STYLES.items() if name in stem]
    if len(found) != 1:
        raise ValueError(
            f"cannot tell how to ask data set {str(dataset)!r}: its name must contain one of "
            f"{', '.join(PROMPT_STYLES)}; rename the file, or give --dataset-name where there is one"
        )
    return found[0]


def build_qa_prompt(sample: Sample, dataset: str | Path, passages: Sequence[int] | None = None) -> ChunkedPrompt:
    """The prompt of a sample over all of its passages, or over `passages` (indices, in the order given).

    IndexError names an index out of range.
    """
    style = prompt_for(dataset)
    chosen = range(len(sample.passages)) if passages is None else passages
    for index in chosen:
        if not 0 <= index < len(sample.passages):
            raise IndexError(f"{sample.sample_id} has passages 0 to {len(sample.passages) - 1}, not {index}")
    return {
        "prefix": style.instruction,
        "chunks": [render_passage(sample.passages[i].title, sample.passages[i].text) for i in chosen],
        "suffix": style.suffix(sample.question),
    }


def join_prompt(prompt: ChunkedPrompt) -> str:
    """The prompt's pieces as one text, for engines that take no chunks."""
    pieces = [prompt["prefix"], *prompt["chunks"], prompt["suffix"]]
    if not all(isinstance(piece, str) for piece in pieces):
        raise TypeError("join_prompt needs a prompt whose pieces are text, not token ids")
    return "".join(map(str, pieces))
