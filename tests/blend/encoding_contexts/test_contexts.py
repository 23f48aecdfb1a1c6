"""What each encoding context puts before a chunk, by hand."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vllm_blend.blend.encoding_contexts import (
    ENCODING_CONTEXTS,
    ContextPieces,
    check_encoding_context,
    make_encoding_context,
)
from vllm_blend.blend.encoding_contexts.base import MAX_PAGE_BEFORE, EncodingContext
from vllm_blend.blend.encoding_contexts.canonical import AfterBos, AfterPrefix
from vllm_blend.blend.encoding_contexts.filler import COUNT, PASSAGES, AfterFiller
from vllm_blend.blend.encoding_contexts.related import AfterGiven, AfterPage

pytestmark = pytest.mark.cpu_only

PREFIX = (0, 9)
CHUNKS = ((1, 1), (2, 2, 2), (3,), (4, 4))
PIECES = ContextPieces(PREFIX, CHUNKS, (None, 0, None, 1))  # 0, 1 and 3 are a page
ROOM = 100_000


def after_filler(count: int = COUNT) -> AfterFiller:
    return AfterFiller(lambda text: [1000 + ord(c) for c in text], count)


def filler_before(context: tuple[int, ...]) -> str:
    """The filler in a context, as text."""
    return "".join(chr(token - 1000) for token in context if token >= 1000)


def filler(count: int) -> str:
    return "".join(f"{text}\n\n" for text in PASSAGES[:count])


def test_after_the_prefix_or_bos_alone() -> None:
    assert [AfterPrefix().before(PIECES, i, ROOM) for i in range(4)] == [PREFIX] * 4
    assert [AfterBos(0).before(PIECES, i, ROOM) for i in range(4)] == [(0,)] * 4
    assert AfterBos(7).before(PIECES, 1, ROOM) == AfterBos(None).before(PIECES, 1, ROOM) == ()
    assert AfterBos(0).before(ContextPieces((), CHUNKS), 1, ROOM) == ()


def test_after_the_passages_of_the_same_page() -> None:
    expected = [PREFIX, (*PREFIX, 1, 1), PREFIX, (*PREFIX, 1, 1, 2, 2, 2)]
    assert [AfterPage().before(PIECES, i, ROOM) for i in range(4)] == expected
    assert AfterPage().before(ContextPieces(PREFIX, CHUNKS), 3, ROOM) == PREFIX


@pytest.mark.parametrize("context", [AfterPage(), after_filler()])
def test_of_a_long_page_the_nearest_passages_stand_before_a_chunk(context: EncodingContext) -> None:
    """So the work grows with the prompt's length, not with its square."""
    count = 3 * MAX_PAGE_BEFORE
    pieces = ContextPieces((), tuple((index,) for index in range(count)), (None, *range(count - 1)))
    page = tuple(range(count))
    for index in (0, 1, MAX_PAGE_BEFORE, MAX_PAGE_BEFORE + 1, count - 1):
        expected = page[max(0, index - MAX_PAGE_BEFORE) : index]
        assert context.before(pieces, index, ROOM)[-len(expected) or ROOM :] == expected
    assert AfterPage().before(pieces, count - 1, ROOM) == page[-MAX_PAGE_BEFORE - 1 : -1]


def test_after_what_is_given() -> None:
    pieces = ContextPieces(PREFIX, CHUNKS, (), ((), (7, 8), (), (8,)))
    expected = [PREFIX, (*PREFIX, 7, 8), PREFIX, (*PREFIX, 8)]
    assert [AfterGiven().before(pieces, i, ROOM) for i in range(4)] == expected
    assert AfterGiven().before(PIECES, 1, ROOM) == PREFIX


def test_passages_far_from_the_chunk_are_left_out_where_there_is_no_room() -> None:
    assert AfterPage().before(PIECES, 3, 7) == (*PREFIX, 1, 1, 2, 2, 2)
    assert AfterPage().before(PIECES, 3, 6) == (*PREFIX, 2, 2, 2)
    assert AfterPage().before(PIECES, 3, 4) == PREFIX
    assert AfterPage().before(PIECES, 3, 1) == PREFIX
    for limit in range(2, 1000, 7):
        context = after_filler(4).before(PIECES, 2, limit)
        assert context[:2] == PREFIX and len(context) <= limit


def test_filler_stands_between_the_prefix_and_the_page() -> None:
    context, pieces = after_filler(3), ContextPieces(PREFIX, CHUNKS, (None, None, 1, None))
    before = [context.before(pieces, i, ROOM) for i in range(4)]
    assert before[3] == before[1] and before[1][:2] == PREFIX and filler_before(before[1]) == filler(3)
    assert before[2] == (*before[1], *CHUNKS[1])
    assert before[3] is before[1] is pieces.after(context.company(False))  # whose digest is then computed once


@pytest.mark.parametrize("continues", [(), (None,), (None, 0), (None, 0, 1)])
def test_chunks_that_are_alone_have_no_filler_unless_they_are_taken_for_others(
    continues: tuple[int | None, ...],
) -> None:
    context, chunks = after_filler(), CHUNKS[: max(1, len(continues))]
    pieces = ContextPieces(PREFIX, chunks, continues)
    for index in range(len(chunks)):
        page = AfterPage().before(pieces, index, ROOM)
        assert context.before(pieces, index, ROOM) == page
        elsewhere = context.before(pieces, index, ROOM, is_alone=False)
        assert filler_before(elsewhere) == filler(COUNT) and elsewhere[-len(page) + 2 or ROOM :] == page[2:]


@pytest.mark.parametrize("continues", [(), (None, None), (None, 0, 0), (None, 0, None)])
def test_chunks_beside_others_all_have_the_same_filler(continues: tuple[int | None, ...]) -> None:
    context, count = after_filler(), len(continues) or len(CHUNKS)
    pieces = ContextPieces(PREFIX, CHUNKS[:count], continues)
    assert {filler_before(context.before(pieces, i, ROOM)) for i in range(count)} == {filler(COUNT)}
    assert filler_before(context.before(ContextPieces((0,), CHUNKS), 0, ROOM)) == ""  # it may be the instruction
    moved = ContextPieces(PREFIX, CHUNKS[1::-1])  # a chunk's company does not depend on its place
    assert context.before(moved, 1, ROOM) == context.before(pieces, 0, ROOM)


@pytest.mark.parametrize("count", [0, len(PASSAGES) + 1])
def test_numbers_of_passages_that_there_are_not(count: int) -> None:
    with pytest.raises(ValueError, match=rf"filler\({count}\)': there are 1 to {len(PASSAGES)} filler passages"):
        check_encoding_context(f"filler({count})")


def test_settings_that_cannot_be() -> None:
    known = r"use one of \['bos', .*'page', 'prefix'\]"
    for name in ("nonesuch", "page(1)", "filler()", "filler(0, 2)", ["page"]):
        with pytest.raises(ValueError, match=f"blend_encoding_context={re.escape(repr(name))} is unknown: {known}"):
            check_encoding_context(cast(Any, name))
    for name in ("bos", "filler", "filler(1)"):
        with pytest.raises(ValueError, match=f"{re.escape(name)}.* needs a tokenizer, and the engine has none"):
            make_encoding_context(name, None, 512)
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: [9])
    with pytest.raises(
        ValueError, match=r"gives the filler passages token 9, and the model has 9: give the tokenizer of"
    ):
        make_encoding_context("filler", cast(Any, tokenizer), 9)
    assert make_encoding_context(None, None, 512) == AfterPage()
    assert {name: kind.name for name, kind in ENCODING_CONTEXTS.items()} == {n: n for n in ENCODING_CONTEXTS}
