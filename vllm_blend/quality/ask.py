"""How questions are asked: by the model's chat template, or in one of the styles of `pipeline/prompts.py`.

A prompt is {"prefix", "chunks", "suffix"}. By a chat template it is one user message: an instruction, the passages with
a blank line after each, and the question. The prefix is all that stands before the first passage, the suffix the
question with what the template puts after the message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_blend.chunks.chat_template import ChatTemplate, between_marks, make_chat_template, template_variables
from vllm_blend.chunks.messages import Message
from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.prompts import QUESTION, PromptStyle, check_template, find_style, render_passage, reworded

INSTRUCTION = "Answer the question with a short phrase copied from the passages."
TEMPLATE = f"Question: {QUESTION}\nAnswer with a short phrase from the passages."
MAX_TOKENS = 24
BY_NAME = "by-name"  # the style that the file's name contains, also for a model with a chat template
_MARK = "TheMessageSays0x6c1f93b7"


@dataclass(frozen=True)
class Asking(ABC):
    """A way to ask the questions of a data set. An answer ends at a new line and has at most `max_tokens` tokens."""

    name: str
    max_tokens: int

    @abstractmethod
    def prompt(self, sample: Sample) -> ChunkedPrompt:
        """Return the prompt of a sample over all of its passages, in their order."""


@dataclass(frozen=True)
class ByStyle(Asking):
    """Ask in a style, whose wording the demo models were trained on."""

    style: PromptStyle

    def prompt(self, sample: Sample) -> ChunkedPrompt:
        return {
            "prefix": self.style.instruction,
            "chunks": [render_passage(passage.title, passage.text) for passage in sample.passages],
            "suffix": self.style.suffix(sample.question),
        }


@dataclass(frozen=True)
class ByChatTemplate(Asking):
    """Ask by the model's chat template. Its special tokens are special ones in the prompt, too."""

    template: ChatTemplate
    head: str  # what the template puts before the message
    tail: str  # and after it
    instruction: str = INSTRUCTION
    question: str = TEMPLATE

    def prompt(self, sample: Sample) -> ChunkedPrompt:
        """Return the prompt. Its prefix is token ids, as BOS is there only if the template has it. Raises ValueError if
        the template changes the text of the message."""
        prefix, chunks, suffix = self.pieces(sample)
        rendered = self.template.render([_user(self.message(sample))])
        if rendered != "".join([prefix, *chunks, suffix]):
            raise ValueError(
                f"{sample.sample_id}: the chat template changes the text of its message, so passages cannot be chunks "
                "of it: give --style musique"
            )
        tokenizer = self.template.tokenizer
        return {"prefix": tokenizer.encode(prefix, add_special_tokens=False), "chunks": chunks, "suffix": suffix}

    def pieces(self, sample: Sample) -> tuple[str, list[str], str]:
        """Return the text before the passages, the passages, and the text after them."""
        chunks = [_with_title(passage.title.strip(), passage.text.strip()) for passage in sample.passages]
        asked = self.question.replace(QUESTION, sample.question.strip())
        return f"{self.head}{self.instruction.rstrip()}\n\n", chunks, asked + self.tail

    def message(self, sample: Sample) -> str:
        """Return what the user says."""
        prefix, chunks, suffix = self.pieces(sample)
        return "".join([prefix.removeprefix(self.head), *chunks, suffix.removesuffix(self.tail)])


def choose_asking(
    tokenizer: PreTrainedTokenizerBase | None,
    path: str | Path,
    style: str | None = None,
    instruction: str = "",
    template: str = "",
) -> Asking:
    """Return how to ask a data set: in the `style`, if one is named; by the model's chat template, if it has one; else
    in the style that the file's name contains (`BY_NAME`). `instruction` and `template` replace the wording.

    Raises ValueError that names the option.
    """
    check_template("--template", template)
    if style is not None or tokenizer is None or tokenizer.chat_template is None:
        found = find_style(None if style == BY_NAME else style, path)
        return ByStyle(f"style {found.name}", found.max_tokens, reworded(found, instruction, template))
    return _reworded(by_chat_template(tokenizer), instruction, template)


def by_chat_template(tokenizer: PreTrainedTokenizerBase) -> ByChatTemplate:
    """Return how to ask by a tokenizer's chat template. Raises ValueError if its messages cannot be taken apart."""
    options: dict[str, Any] = {}
    if "enable_thinking" in template_variables(tokenizer.get_chat_template()):
        options["enable_thinking"] = False  # a short phrase is asked for
    template = make_chat_template(tokenizer, None, "auto", None, options, True, False)
    around = between_marks(template.render([_user(_MARK)]), [_MARK])
    if around is None:
        raise ValueError(
            "the chat template does not show the user's message once and unchanged, so passages cannot be chunks of "
            "it: give --style musique"
        )
    return ByChatTemplate("chat template", MAX_TOKENS, template, *around)


def _reworded(asking: ByChatTemplate, instruction: str, template: str) -> ByChatTemplate:
    """Return a way to ask with another wording, in which a backslash and an n stand for a new line."""
    instruction, template = (text.replace("\\n", "\n").strip() for text in (instruction, template))
    return replace(asking, instruction=instruction or asking.instruction, question=template or asking.question)


def _user(text: str) -> Message:
    return Message({"role": "user"}, (text,))


def _with_title(title: str, text: str) -> str:
    return (f"{title}\n" if title else "") + f"{text}\n\n"
