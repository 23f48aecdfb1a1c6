"""A model's chat template: what it reads, the text that it makes, and how it splits around chunks."""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    DocstringParsingException,
    TypeHintParsingException,
    get_json_schema,
)

from vllm_blend.checks import a_type
from vllm_blend.chunks.messages import ContentFormat, Message, with_short_ids, with_single_calls

logger = logging.getLogger(__name__)

# What a template that does not fit its messages raises or runs into.
TEMPLATE_ERRORS = (TemplateError, TypeError, ArithmeticError, RecursionError)

_AS_PYTHON = re.compile(r"""['"]text\\?['"] *: *\\?['"]TheMark0x6b1e""")  # a list of parts, printed as it is
_SYSTEM, _USER = "TheSystemSays0x1f3b5d79", "TheUserSays0x2e4c6a88"
_FLAGS = frozenset(("add_generation_prompt", "continue_final_message"))
# Arguments of `apply_chat_template` that are no variables of a template: they would change what it returns.
_RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {
    *_FLAGS,
    "tools",
    "documents",
} | {"messages"}


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer's chat template, or the one given, and what it is rendered with."""

    tokenizer: PreTrainedTokenizerBase
    text: str
    content_format: ContentFormat  # "openai" if the template has a loop over parts, or all contents are to be parts
    options: dict[str, Any] = field(default_factory=dict)
    is_detected: bool = False

    def render(
        self,
        messages: Sequence[Message],
        texts: Sequence[Sequence[str]] | None = None,
        formats: Sequence[ContentFormat] | None = None,
    ) -> str:
        """Return the text of a conversation, with its own texts or with others in their places. `formats` are those of
        `formats_of`, which other texts do not change."""
        own = [message.texts for message in messages] if texts is None else texts
        formats = self.formats_of(messages) if formats is None else formats
        given = zip(messages, formats, own, strict=True)
        return render(self.tokenizer, [m.render(how, each) for m, how, each in given], self.text, **self.options)

    def fit(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages as the template takes them, if it takes them in another form: with one tool call a message,
        or short ids of calls. Raises ValueError for a final message that cannot be continued."""
        last = messages[-1]
        if self.options.get("continue_final_message") and ("tool_calls" in last.fields or not "".join(last.texts)):
            what = "has tool calls" if "tool_calls" in last.fields else "has no text"
            raise ValueError(
                f"continue_final_message: the final message {what}, but a text is what can be continued: leave "
                "continue_final_message out, or end with a message of text alone"
            )
        if not any("tool_calls" in message.fields for message in messages):
            return messages
        short = with_short_ids(messages)
        for each in (messages, short, with_single_calls(messages), with_single_calls(short)):
            try:
                self.render(each)
            except (*TEMPLATE_ERRORS, ValueError):
                continue
            return each
        return messages

    def formats_of(self, messages: Sequence[Message]) -> tuple[ContentFormat, ...]:
        """Return how the template is given each content: as the message has it, if the template shows all of its texts
        so, and else in the other way: a list as one string, a string as a list of one part, and nothing as "".

        The messages of a role that are alike have the same format. Which one shows their texts is seen by rendering
        marks in the places of the texts.
        """
        if not self.is_detected:
            return tuple("none" if not message.texts else self.content_format for message in messages)
        lists: ContentFormat = self.content_format
        chosen: dict[tuple[str, bool, bool], ContentFormat] = {}
        for message in messages:
            chosen[_kind(message)] = "none" if not message.texts else lists if message.in_parts else "string"

        def formats() -> tuple[ContentFormat, ...]:
            return tuple(chosen[_kind(message)] for message in messages)

        if self.content_format == "string" and all(message.texts for message in messages):
            return formats()
        least = self._num_lost(messages, formats())
        for kind in list(chosen):
            if least > 0:
                before = chosen[kind]
                chosen[kind] = "string" if before != "string" else lists
                lost = self._num_lost(messages, formats())
                least, chosen[kind] = (lost, chosen[kind]) if lost < least else (least, before)
        if least == math.inf:  # several contents are not what the template takes
            alike: tuple[ContentFormat, ...] = ("string", lists)
            every = [tuple(each for _ in messages) for each in alike]
            return next((each for each in every if self._num_lost(messages, each) < math.inf), formats())
        return formats()

    def _num_lost(self, messages: Sequence[Message], formats: Sequence[ContentFormat]) -> float:
        """Return how many texts the template does not show once and as text, infinity if it takes no such messages."""
        marks = [[f"TheMark0x6b1e{i}p{part}e" for part in range(len(m.texts))] for i, m in enumerate(messages)]
        try:
            shown = self.render(messages, marks, formats)
        except (*TEMPLATE_ERRORS, ValueError):
            return math.inf
        lost = sum(shown.count(mark) != 1 for each in marks for mark in each)
        return lost + len(_AS_PYTHON.findall(shown)) + (shown.count("None") if "none" in formats else 0)

    @cached_property
    def unused(self) -> list[str]:
        """Return the options that the template does not read."""
        known = template_variables(self.text) | _FLAGS
        return [name for name, value in self.options.items() if value is not None and name not in known]


def make_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    content_format: Literal["auto", "string", "openai"],
    tools: Sequence[Any] | None,
    template_kwargs: dict[str, Any] | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> ChatTemplate:
    """Check the arguments of `LLM.chat` that say how conversations are rendered.

    Raises ValueError or TypeError that names the argument.
    """
    if content_format not in ("auto", "string", "openai"):
        raise ValueError(
            f"chat_template_content_format={content_format!r} is unknown: use 'auto', 'string' or 'openai'"
        )
    if not isinstance(chat_template, str | None):
        raise TypeError(f"chat_template is {a_type(chat_template)}: give the template's text")
    given = {} if template_kwargs is None else template_kwargs
    if not isinstance(given, dict) or not all(isinstance(name, str) for name in given):
        raise TypeError(f"chat_template_kwargs={given!r}: give a dict of the template's variables")
    if reserved := sorted(_RESERVED.intersection(given)):
        raise ValueError(f"chat_template_kwargs has {', '.join(reserved)}: give the template's own variables alone")
    flags = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    options = {"tools": tools, **flags, **given}
    for name in flags:
        if not isinstance(options[name], bool):
            where = f"chat_template_kwargs[{name!r}]" if name in given else name
            raise TypeError(f"{where}={options[name]!r} is {a_type(options[name])}: give True or False")
    if options["add_generation_prompt"] and options["continue_final_message"]:
        raise ValueError(
            "add_generation_prompt and continue_final_message exclude each other: give add_generation_prompt=False to "
            "have the final message continued"
        )
    options["tools"] = _parse_tools(options["tools"], "chat_template_kwargs['tools']" if "tools" in given else "tools")
    if chat_template is None and tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template: give chat_template, or use generate() with plain prompts")
    text = tokenizer.get_chat_template(chat_template, tools=options["tools"])
    try:
        detected = detect_content_format(text)
    except TEMPLATE_ERRORS as error:
        raise ValueError(f"the chat template cannot be parsed: {error}") from error
    is_auto = content_format == "auto"
    template = ChatTemplate(tokenizer, text, detected if content_format == "auto" else content_format, options, is_auto)
    if template.unused:
        logger.warning("the chat template does not read %s: leave out what changes nothing", ", ".join(template.unused))
    return template


def _parse_tools(tools: Any, name: str) -> list[dict[str, Any]] | None:
    """Return the schemas of tools, which are given as such or as functions. Raises TypeError or ValueError that names
    the tool."""
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise TypeError(f"{name} is {a_type(tools)}: give a list of tools")
    schemas = []
    for index, tool in enumerate(tools):
        if isinstance(tool, dict):
            schemas.append(tool)
            continue
        if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
            raise TypeError(f"{name}[{index}] is {a_type(tool)}: give a JSON schema as a dict, or a function")
        try:
            schemas.append(get_json_schema(tool))
        except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError, NameError) as error:
            raise ValueError(
                f"{name}[{index}], the function {tool.__name__!r}, cannot be described to the model ({error}): give it "
                "type hints and a docstring with an 'Args:' section that describes every argument, or give a JSON "
                "schema as a dict"
            ) from error
    return schemas


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], chat_template: str | None, **options: Any
) -> str:
    """Return the text that the chat template makes of messages. Raises one of `TEMPLATE_ERRORS` when it refuses them,
    and ValueError when the options do not fit."""
    return str(tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False, **options))


def _kind(message: Message) -> tuple[str, bool, bool]:
    return message.role, message.in_parts, bool(message.texts)


@dataclass(frozen=True)
class TemplateSplit:
    """Text before the system prompt, between it and what the user says, and behind that. Without a system prompt
    `middle` is empty and `head` is what stands before the user's part."""

    head: str
    middle: str
    tail: str


def split_template(
    tokenizer: PreTrainedTokenizerBase, with_system: bool, chat_template: str | None = None, **template_kwargs: Any
) -> TemplateSplit:
    """Split the tokenizer's chat template, or the one given, around the chunks of a composition.

    The template is rendered once with marks where contents go. What it puts before, between and behind them and the
    contents are the whole conversation, unless the template strips white space from contents (see
    `ChunkedLLM.preview_composition`).

    Raises ValueError if there is no template, or if it does not show every content once, unchanged and in order.
    """
    if chat_template is None and tokenizer.chat_template is None:
        raise ValueError("the tokenizer has no chat template: give chat_template, or leave use_chat_template out")
    messages = conversation(_SYSTEM if with_system else None, _USER)
    try:
        text = render(tokenizer, messages, chat_template, add_generation_prompt=True, **template_kwargs)
    except TEMPLATE_ERRORS as error:  # some say so that they take no system prompt
        what = "a system prompt and a question" if with_system else "a question alone"
        raise ValueError(
            f"the chat template does not take {what} ({error}): give chat_template, or leave system_chunk_id out"
        ) from error
    between = between_marks(text, [_SYSTEM, _USER] if with_system else [_USER])
    if between is None:
        raise ValueError(
            "the chat template does not show the system prompt and the user's message once each, unchanged and in this "
            "order, so it cannot be split around chunks: give chat_template, or build the prompt without"
        )
    head, middle, tail = between if with_system else (between[0], "", between[1])
    return TemplateSplit(head, middle, tail)


def conversation(system: str | None, user: str) -> list[dict[str, Any]]:
    """Return the messages that a composition stands for."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": user}]


def between_marks(text: str, marks: Sequence[str]) -> list[str] | None:
    """Return what stands before, between and behind the marks in `text`; None unless each is there once, in order."""
    if any(text.count(mark) != 1 for mark in marks):
        return None
    pieces, rest = [], text
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found:  # it stands before another one
            return None
        pieces.append(before)
    return [*pieces, rest]


class _Generation(Extension):
    """The {% generation %} blocks of training templates, which transformers knows and Jinja does not."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Parser) -> nodes.Scope:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


@lru_cache(maxsize=32)
def detect_content_format(template: str) -> ContentFormat:
    """Return "openai" for a template with a loop over the content of a message, as vLLM does, and "string" for others:
    these would show a list as Python writes it. Raises TemplateSyntaxError for text that is no template."""
    tree = _parse(template)
    messages = {"messages"}
    assignments = [(a.target.name, a.node) for a in tree.find_all(nodes.Assign) if isinstance(a.target, nodes.Name)]
    while found := {name for name, value in assignments if _source(value) in messages} - messages:
        messages |= found
    loops = [(loop.target.name, loop.iter) for loop in tree.find_all(nodes.For) if isinstance(loop.target, nodes.Name)]
    contents = {f"{name}.content" for name, items in loops if _source(items) in messages}
    return "openai" if any(_source(items) in contents for _, items in loops) else "string"


@lru_cache(maxsize=32)
def template_variables(template: str) -> frozenset[str]:
    """Return the variables that a template reads from what it is rendered with."""
    return frozenset(find_undeclared_variables(_parse(template)))


def _parse(template: str) -> nodes.Template:
    return Environment(extensions=[loopcontrols, _Generation]).parse(template)


def _source(node: nodes.Node) -> str | None:
    """Return what an expression takes its items from: "name" or "name.key", seen through slices, filters and tests."""
    while isinstance(node, nodes.Filter | nodes.Test | nodes.Getitem):
        if isinstance(node, nodes.Getitem) and not isinstance(node.arg, nodes.Slice):
            break
        if node.node is None:
            return None
        node = node.node
    if isinstance(node, nodes.Name):
        return node.name
    if isinstance(node, nodes.Getattr):
        key: object = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        key = node.arg.value
    else:
        return None
    return f"{node.node.name}.{key}" if isinstance(node.node, nodes.Name) else None
