"""Prompts of the data sets, in pieces: an instruction, the passages as chunks, and the question with an open answer.

The wording is exactly what the demo model was trained on. A prompt is {"prefix", "chunks", "suffix"}, which
`LLM.generate` accepts as it is. Every piece ends with a line break, so a chunk has the same token ids wherever it
stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_blend.pipeline.datasets import Sample

if TYPE_CHECKING:
    from vllm_blend.inputs import ChunkedPrompt


QUESTION = "{question}"
SHOWN = 200  # characters of a text in an error message


@dataclass(frozen=True)
class PromptStyle:
    """How a data set is asked and scored. An answer ends with a newline and has at most `max_tokens` tokens."""

    name: str
    instruction: str
    max_tokens: int
    metric: str  # "f1" or "rouge_l": the score that papers report on this data set
    template: str = ""  # what follows the passages, with QUESTION in it; empty: the style's own wording

    def suffix(self, question: str) -> str:
        """Return the question, open for the answer: "Question: ...\\nAnswer:", or the dialogue followed by
        "Summary:"; with a template, the template with the question in its place."""
        if self.template:
            return self.template.replace(QUESTION, question.strip())
        if self.name != "samsum":
            return f"Question: {question.strip()}\nAnswer:"
        dialogue = question.strip().removesuffix("Summary:").rstrip()
        return ("" if dialogue.startswith("Dialogue:") else "Dialogue: ") + f"{dialogue}\nSummary:"


PROMPT_STYLES = {
    style.name: style
    for style in (
        PromptStyle(
            "musique",
            "You will be asked a question after reading several passages. Answer within five words.\nPassages:\n",
            max_tokens=24,
            metric="f1",
        ),
        PromptStyle(
            "wikimqa",
            "Answer the question based on the given passages. Only give me the answer.\nPassages:\n",
            max_tokens=24,
            metric="f1",
        ),
        PromptStyle(
            "samsum", "Summarize the dialogue in the style of the examples.\n\n", max_tokens=48, metric="rouge_l"
        ),
    )
}


def prompt_for(dataset: str | Path) -> PromptStyle:
    """Return the style of a data set, by name ("musique") or by a file name that contains it ("inputs/musique_s.json").

    Raises ValueError that lists the known styles.
    """
    stem = Path(dataset).stem.lower()
    found = [style for name, style in PROMPT_STYLES.items() if name in stem]
    if len(found) != 1:
        raise ValueError(
            f"cannot tell how to ask data set {str(dataset)!r}: its name must contain one of "
            f"{', '.join(PROMPT_STYLES)}; rename the file, or name the style (--style of check-model and "
            "finetune, --dataset-style or DATASET_STYLE of the pipeline's stages)"
        )
    return found[0]


def render_passage(title: str, text: str) -> str:
    """Return a passage as it stands in the prompt: its title (if any) and its text, each followed by a blank line."""
    return (f"{title}\n\n" if title else "") + f"{text}\n\n"


def find_style(name: str | None, dataset: str | Path) -> PromptStyle:
    """Return the style called `name`; None: the one that the data set's file name contains. Raises ValueError that
    lists the known styles."""
    if name is None:
        return prompt_for(dataset)
    if name not in PROMPT_STYLES:
        raise ValueError(f"--style {name!r} is unknown: use one of {', '.join(PROMPT_STYLES)}")
    return PROMPT_STYLES[name]


def check_text(name: str, text: str) -> None:
    """Raise ValueError, beginning with `name`, for a text that is no Unicode: a shell passes any bytes on."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}={shortened(text)} is not UTF-8 at character {error.start}: encode it so") from error


def shortened(text: str) -> str:
    """Return a text as it stands in an error message."""
    return repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r}... ({len(text)} characters)"


def check_template(name: str, template: str) -> None:
    """Raise ValueError, beginning with `name`, unless a template is empty or has the question in exactly one place."""
    check_text(name, template)
    if template and template.count(QUESTION) != 1:
        raise ValueError(
            f"{name}={shortened(template)} must hold {QUESTION} once, where the question goes, and holds it "
            f"{template.count(QUESTION)} times: write for example 'Question: {QUESTION}\\nAnswer:'"
        )


def reworded(style: PromptStyle, instruction: str = "", template: str = "") -> PromptStyle:
    """Return a style with an own instruction before the passages, an own template after them, or both; what is empty
    stays as it is.

    A backslash and an n stand for a new line, as a shell passes them on. An instruction ends with a new line, whether
    or not it is given one, so that the first passage begins on a line of its own.
    """
    check_template("template", template)
    if instruction:
        text = _with_newlines(instruction)
        style = replace(style, instruction=text if text.endswith("\n") else f"{text}\n")
    return replace(style, template=_with_newlines(template)) if template else style


def _with_newlines(text: str) -> str:
    return text.replace("\\n", "\n")


def build_qa_prompt(sample: Sample, dataset: str | Path, passages: Sequence[int] | None = None) -> ChunkedPrompt:
    """Return the prompt of a sample over all of its passages, or over `passages` (indices, in the order given).

    Raises IndexError that names an index out of range.
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
