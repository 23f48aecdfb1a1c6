"""Where the texts that a chat template is given stand in the text that it makes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_blend.chunks.chat_template import TEMPLATE_ERRORS
from vllm_blend.chunks.composition import matching_prefix

Render = Callable[[Sequence[str]], str]  # returns the whole text, for these texts in the slots

_MARK = "ThePartSays0x5d2c90e7n{}e"
_MARKS = re.compile(_MARK.format("(0|[1-9][0-9]{,8})"))


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
