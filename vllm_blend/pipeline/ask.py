"""How questions are asked: by the model's chat template, or in one of the styles of `prompts.py`.

A prompt is {"prefix", "chunks", "suffix"}. By a chat template it is one user message: an instruction, the passages with
a blank line after each, and the question. The prefix is all that stands before the first passage, the suffix the
question with what the template puts after the message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from vllm_blend.chunks.chat_template import (
    TEMPLATE_ERRORS,
    ChatTemplate,
    between_marks,
    make_chat_template,
    template_variables,
)
from vllm_blend.chunks.messages import Message
from vllm_blend.inputs import ChunkedPrompt
from vllm_blend.pipeline.datasets import Sample, SamplePassage
from vllm_blend.pipeline.prompts import (
    PROMPT_STYLES,
    QUESTION,
    PromptStyle,
    check_template,
    find_style,
    render_passage,
    reworded,
)

CHAT_STYLE = PromptStyle(
    "chat template",
    "Answer the question with a short phrase copied from the passages.",
    max_tokens=24,
    metric="f1",
    template=f"Question: {QUESTION}\nAnswer with a short phrase from the passages.",
)
BY_NAME = "by-name"  # the style that the file's name contains, also for a model with a chat template
_MARK, _ANSWER_MARK = "TheMessageSays0x6c1f93b7", "TheAnswerSays0x3e58a1d4"


@dataclass(frozen=True)
class Asking(ABC):
    """A way to ask the questions of a data set. An answer ends at a new line and has at most `style.max_tokens`
    tokens."""

    name: str
    style: PromptStyle

    @property
    def max_tokens(self) -> int:
        return self.style.max_tokens

    @property
    @abstractmethod
    def prefix(self) -> str | list[int]:
        """Return what stands before the passages, the same for all questions."""

    @abstractmethod
    def passage(self, title: str, text: str) -> str:
        """Return a passage as it stands in the prompt."""

    @abstractmethod
    def suffix(self, question: str) -> str:
        """Return what stands after the passages."""

    @abstractmethod
    def answer(self, text: str) -> str:
        """Return an answer as the model should write it, with what ends it."""

    def prompt(self, sample: Sample, passages: Sequence[SamplePassage] | None = None) -> ChunkedPrompt:
        """Return the prompt of a sample over all of its passages, in their order, or over others."""
        chosen = sample.passages if passages is None else passages
        return {
            "prefix": self.prefix,
            "chunks": [self.passage(passage.title, passage.text) for passage in chosen],
            "suffix": self.suffix(sample.question),
        }


@dataclass(frozen=True)
class ByStyle(Asking):
    """Ask in a style, whose wording the demo models were trained on."""

    @property
    def prefix(self) -> str:
        return self.style.instruction

    def passage(self, title: str, text: str) -> str:
        return render_passage(title, text)

    def suffix(self, question: str) -> str:
        return self.style.suffix(question)

    def answer(self, text: str) -> str:
        return f" {text}\n"


@dataclass(frozen=True)
class ByChatTemplate(Asking):
    """Ask by the model's chat template. Its special tokens are special ones in the prompt, too."""

    template: ChatTemplate
    head: str  # what the template puts before the message
    tail: str  # and after it

    @cached_property
    def prefix(self) -> list[int]:
        """Return token ids, as BOS is there only if the template has it."""
        return list(self.template.tokenizer.encode(self.prefix_text, add_special_tokens=False))

    @property
    def prefix_text(self) -> str:
        return f"{self.head}{self.style.instruction.strip()}\n\n"

    def passage(self, title: str, text: str) -> str:
        title, text = title.strip(), text.strip()
        return (f"{title}\n" if title else "") + f"{text}\n\n"

    def suffix(self, question: str) -> str:
        return self.style.suffix(question).strip() + self.tail

    def answer(self, text: str) -> str:
        before, after = self._around_answer
        return f"{before}{text}{after}"

    @cached_property
    def _around_answer(self) -> tuple[str, str]:
        """Return what the template writes between the generation prompt and an answer, and the end of its turn: a new
        line, which ends answers too, if it has none of its own."""
        said = replace(self.template, options=self.template.options | {"add_generation_prompt": False})
        try:
            text = said.render([_message("user", _MARK), _message("assistant", _ANSWER_MARK)])
        except TEMPLATE_ERRORS:
            return "", "\n"
        between = between_marks(text, [_MARK, _ANSWER_MARK])
        if between is None:
            return "", "\n"
        _, before, after = between
        return before.removeprefix(self.tail) if before.startswith(self.tail) else "", after.strip() or "\n"

    def prompt(self, sample: Sample, passages: Sequence[SamplePassage] | None = None) -> ChunkedPrompt:
        """Return the prompt. Raises ValueError if the template changes the text of the message."""
        prompt = super().prompt(sample, passages)
        texts = [self.prefix_text, *map(str, prompt["chunks"]), str(prompt["suffix"])]
        message = "".join(texts).removeprefix(self.head).removesuffix(self.tail)
        if self.template.render([_message("user", message)]) != "".join(texts):
            raise ValueError(
                f"{sample.sample_id}: the chat template changes the text of its message, so passages cannot be chunks "
                f"of it: {_NAME_A_STYLE}"
            )
        return prompt


_NAME_A_STYLE = "name a style, such as --style musique (in the pipeline --dataset-style)"


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
    chat = None if style is not None or tokenizer is None else by_chat_template(tokenizer, _chat_style(path))
    if chat is None:
        found = find_style(None if style == BY_NAME else style, path)
        return ByStyle(f"style {found.name}", reworded(found, instruction, template))
    return ByChatTemplate(chat.name, reworded(chat.style, instruction, template), chat.template, chat.head, chat.tail)


def by_chat_template(tokenizer: PreTrainedTokenizerBase, style: PromptStyle = CHAT_STYLE) -> ByChatTemplate | None:
    """Return how to ask by a tokenizer's chat template; None if it has none, or one that shows a user's message like an
    assistant's: that one was not made for an instruct model. Raises ValueError if its messages cannot be taken
    apart."""
    if tokenizer.chat_template is None:
        return None
    options: dict[str, Any] = {}
    if "enable_thinking" in template_variables(tokenizer.get_chat_template()):
        options["enable_thinking"] = False  # a short phrase is asked for
    template = make_chat_template(tokenizer, None, "auto", None, options, True, False)
    rendered = template.render([_message("user", _MARK)])
    if _renders_alike(template, rendered):
        return None
    around = between_marks(rendered, [_MARK])
    if around is None:
        raise ValueError(
            "the chat template does not show the user's message once and unchanged, so passages cannot be chunks of "
            f"it: {_NAME_A_STYLE}"
        )
    return ByChatTemplate("chat template", style, template, *around)


def _renders_alike(template: ChatTemplate, rendered: str) -> bool:
    try:
        return template.render([_message("assistant", _MARK)]) == rendered
    except TEMPLATE_ERRORS:  # it wants a user's message first
        return False


def _chat_style(path: str | Path) -> PromptStyle:
    """Return the words for a chat model: those of the style for dialogues, which are to be summarized, if the file's
    name says so."""
    summary = PROMPT_STYLES["samsum"]
    return summary if summary.name in Path(path).stem.lower() else CHAT_STYLE


def _message(role: str, text: str) -> Message:
    return Message({"role": role}, (text,))
