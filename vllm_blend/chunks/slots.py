"""Where the texts that a chat template is given stand in the text that it makes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_blend.chunks.chat_template import TEMPLATE_ERRORS
from vllm_blend.chunks.composition import matching_prefix
from vllm_blend.prompt_pieces import ControlTokens

Render = Callable[[Sequence[str]], str]  # returns the whole text, for these texts in the slots

_MARK = "ThePartSays0x5d2c90e7n{}e"
_MARKS = re.compile(_MARK.format("(0|[1-9][0-9]{,8})"))
_BEGIN, _END = (f"The{edge}Of0x{secrets.token_hex(16)}" for edge in ("Beginning", "End"))
_EDGES = re.compile(f"({_BEGIN}|{_END})")


@dataclass(frozen=True)
class Slot:
    """The place of a text in the whole one: characters `start` to `stop` - 1, with what is left of the white space
    around it. `core` is where the text begins without that."""

    start: int
    stop: int
    core: int


def find_slots(render: Render, texts: Sequence[str], numbers: Sequence[int], whole: str) -> dict[int, Slot] | None:
    """Return where the texts of these numbers stand in `whole`, which is what `render` makes of all texts, in the order
    in which they stand there. None if they do not stand there once each and unchanged.

    The text is rendered again with marks in the places of the texts. White space around a text stays with its mark, as
    many templates strip it.
    """
    marks = {number: _MARK.format(number) for number in numbers}
    marked = list(texts)
    for number, mark in marks.items():
        marked[number] = texts[number].replace(texts[number].strip(), mark, 1)
    try:
        rendered = render(marked)
    except (*TEMPLATE_ERRORS, ValueError):  # the template takes the texts, but not the marks
        return None
    pieces = _MARKS.split(rendered)  # once over the text, however many marks there are
    between, order = pieces[::2], [int(number) for number in pieces[1::2]]
    if sorted(order) != sorted(marks):
        return None
    cores = [texts[number].strip() for number in order]
    if between[0] + "".join(map(str.__add__, cores, between[1:])) != whole:
        return None
    slots, position, taken = {}, 0, 0
    for index, (number, core) in enumerate(zip(order, cores, strict=True)):
        text = texts[number]
        before, after = text[: text.index(core)], text[len(text.rstrip()) :]
        position += len(between[index])
        begin = position
        start = position - len(before) if between[index][taken:].endswith(before) else position
        position += len(core)
        taken = len(after) if between[index + 1].startswith(after) else 0
        slots[number] = Slot(start, position + taken, begin)
    return slots


def render_literal(
    render: Render, texts: Sequence[str], numbers: Sequence[int], control: ControlTokens
) -> tuple[str, list[tuple[int, int]]]:
    """Return the whole text, and the spans of it in which control tokens are text: those texts of `numbers` that hold
    one or a part of one.

    The text is rendered again with secret marks around such texts, which are then taken out. Raises ValueError if the
    template does not leave the texts between the marks.
    """
    concerned = [number for number in numbers if control.concerns(texts[number])]
    if not concerned:
        return render(texts), []
    marked = list(texts)
    for number in concerned:
        core = texts[number].strip()
        marked[number] = texts[number].replace(core, f"{_BEGIN}{core}{_END}", 1)
    pieces, spans, start, length = _EDGES.split(render(marked)), [], None, 0
    for piece, mark in zip(pieces[::2], [*pieces[1::2], None], strict=True):
        length += len(piece)
        if (start is None) is (mark == _END):
            raise ValueError(
                "the chat template takes apart a text that holds a control token or a part of one, so that it cannot "
                "be taken for text: remove it, or start the engine with trusted_chunks=True if all texts come from you"
            )
        if mark == _END:
            spans.append((start or 0, length))
        start = length if mark == _BEGIN else None
    return "".join(pieces[::2]), spans


def find_beginning(render: Render, texts: Sequence[str], first: int, whole: str) -> int | None:
    """Return the character up to which the whole text does not depend on the text of number `first`: where it differs
    from what is rendered with a mark in the place of that text. None if the template refuses the mark."""
    mark = _MARK.format(0)
    is_alike = texts[first].lstrip()[0] == mark[0]
    marked = list(texts)
    marked[first] = "-" + mark if is_alike else mark  # it must not begin as the text does
    try:
        return matching_prefix(whole, render(marked))
    except (*TEMPLATE_ERRORS, ValueError):
        return None
