"""Known passages are found at any offset, whatever stands beside them."""

from __future__ import annotations

import sys
from collections import defaultdict
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.entrypoints.openai.passages import search
from vllm_blend.entrypoints.openai.passages.anchors import AnchoredText, Comparison, TextIndex
from vllm_blend.entrypoints.openai.passages.finder import PassageFinder, TextSection
from vllm_blend.entrypoints.openai.passages.text_pieces import split_text

INSTRUCTION = "Answer by what the passages say."


def prose(seed: int, length: int = 400) -> str:
    """Return a passage of sentences, the same one for a seed."""
    rng = Random(seed)
    text = ""
    while len(text) < length:
        sentence = " ".join("".join(rng.choices("aeioulnrstdkmé", k=rng.randint(2, 9))) for _ in range(9))
        text += f"{sentence.capitalize()}. "
    return text.strip()


PASSAGES = [prose(seed) for seed in range(8)]


def chunks(known: PassageFinder, text: str, salt: str | None = None) -> list[str]:
    """Return the texts of a prompt's chunks, which are in order and do not overlap."""
    found = known.find(text, [TextSection(split_text(text), num_kept=1)], salt, False).chunks
    edges = [edge for span in found for edge in span]
    assert edges == sorted(edges) and all(start < stop <= len(text) for start, stop in found)
    return [text[start:stop].strip() for start, stop in found]


def ask(context: str, number: int = 0) -> str:
    """Return a prompt that begins as no other one does, so that nothing is left to the prefix cache."""
    return f"Request {number}. {INSTRUCTION}\n\n{context}\n\nWho asks for the {number}th time?"


NUMBERED: dict[str, Any] = {
    "in brackets": "\n\n".join(f"[{{{i}[0]}}] {{{i}[1]}}" for i in range(4)),
    "of lines": "Context:\n" + "\n".join(f"[{{{i}[0]}}] {{{i}[1]}}" for i in range(4)),
    "named": "\n\n".join(f"Document {{{i}[0]}}: {{{i}[1]}}" for i in range(4)),
    "with scores": "\n\n".join(f"Result {{{i}[0]}}, of a score of 0.{{{i}[0]}}7, says: {{{i}[1]}}" for i in range(4)),
    "sources": "\n".join(f'<source id="{{{i}[0]}}" name="a.pdf">{{{i}[1]}}</source>' for i in range(4)),
    "a list": '{{"results": [' + ", ".join(f'{{{{"n": {{{i}[0]}}, "text": "{{{i}[1]}}"}}}}' for i in range(4)) + "]}}",
    "one paragraph": " ".join(f"({{{i}[0]}}) {{{i}[1]}}" for i in range(4)),
}


@pytest.mark.parametrize("form", NUMBERED)
def test_numbers_that_change(form: str) -> None:
    """Passages in another order, with other numbers, are chunks the second time, and the same ones from then on."""
    finder = PassageFinder()
    found: list[dict[str, str]] = []
    for turn in range(5):
        chosen = [(place * (1 if turn % 2 else 3) + turn) % 4 for place in range(4)]
        order = [PASSAGES[number] for number in chosen]
        numbers = [(3 * turn + 4 * number) % 17 for number in chosen]  # another one for a passage each time
        texts = chunks(finder, ask(NUMBERED[form].format(*zip(numbers, order, strict=True)), turn))
        found.append({passage: text for passage in order for text in texts if passage[100:-30] in text})
    assert found[0] == {} and found[2] == found[3] == found[4]
    for passage in PASSAGES[:4]:
        assert found[1][passage] == found[2][passage]
        assert len(found[2][passage]) > 0.9 * len(passage)


@pytest.mark.parametrize("write", ["{0} {1} {2}", "{0}\n{1}\n{2}", "say: {1}, and {0}; {2}", "{2}\nThe end of this."])
@pytest.mark.parametrize("how", ["seen", "named", "registered"])
def test_inside_longer_paragraphs(write: str, how: str) -> None:
    """A passage is found whole there that has been a piece, a document or a stored passage before."""
    finder = PassageFinder()
    passages = [PASSAGES[0], PASSAGES[1], "\n\n".join(PASSAGES[2:4]) if how != "seen" else PASSAGES[2]]
    if how == "seen":
        assert chunks(finder, ask("\n\n".join(passages))) == []
    for passage in passages:
        if how == "named":
            finder.see([passage], None)
        if how == "registered":
            finder.register(passage, None)
    text = "It is said that " + write.format(*passages)
    expected = sorted((passage for passage in passages if passage in text), key=text.index)
    assert chunks(finder, ask(text, 1)) == expected
    if how == "registered":
        for passage in passages:
            finder.forget(passage, None)
        assert chunks(finder, ask("Nobody knows whether " + write.format(*passages), 2)) == []
        assert not finder._registered


def test_a_passage_that_was_changed() -> None:
    """What is left of it on both sides of the change is known, and so is the whole as it was."""
    finder, (first, second) = PassageFinder(), PASSAGES[:2]
    changed = f"{first} Something else. {second}"
    for number, text in enumerate((f"{first} {second}", changed)):
        found = chunks(finder, ask(text, number))
    assert found == [first, second]
    assert chunks(finder, ask(changed, 3)) == [first, second]


def test_the_question_is_no_passage() -> None:
    """In the last piece passages are found before its last two lines. LlamaIndex' prompt is of this kind."""
    finder = PassageFinder()
    tail = "\n---------------------\nGiven the context and nothing else, answer the query.\nQuery: {}\nAnswer: "
    question = prose(99, 200)
    for number, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1], [2, 0, 1])):
        head = "Context information is below.\n---------------------\n"
        text = head + "\n\n".join(PASSAGES[i] for i in order) + tail.format(question)
        found = chunks(finder, text)
        assert not any(line in text for line in question.split(". ") for text in found)
        if number > 2:
            assert found == [PASSAGES[i] for i in order]
    one_piece = "Context:\n{}\n{}\n{}\nQuestion: {}\nAnswer:"
    for number in range(3):
        text = one_piece.format(*(PASSAGES[(i * (number + 1) + number) % 5] for i in range(1, 4)), question)
        found = chunks(finder, text, "another")
        assert question[:40] not in "".join(found)
    assert found


@pytest.mark.parametrize("join", ["\n", " ", "\n\n"])
def test_a_growing_prompt_is_left_to_the_prefix_cache(join: str) -> None:
    """Pieces without blank lines, too: what it has in common with the last one is at its beginning."""
    finder = PassageFinder()
    for count in range(1, 8):
        assert chunks(finder, join.join(PASSAGES[:count]) + f"\n\nWho is the {count}th?") == []


def test_what_is_too_much_is_forgotten() -> None:
    """The oldest texts first; those in use stay. Nothing grows beyond its limit."""
    finder = PassageFinder(max_bytes=20_000)
    texts = [prose(1000 + number) for number in range(200)]
    for number, text in enumerate(texts):
        found = chunks(finder, ask(f"{PASSAGES[0]} {text}", number))
        assert number < 2 or found == [PASSAGES[0]]
        [tenant] = finder._tenants.values()
        assert len(tenant.young.data) + len(tenant.old.data) <= 20_000 + 1000  # of the last prompt
        assert tenant.young.numbers.keys() <= {*tenant.young.names}
    assert chunks(finder, ask(f"So they say: {texts[0]}", 500)) == []
    assert chunks(finder, ask(f"So they say: {texts[-1]}", 501)) == [texts[-1]]


def test_registered_texts_that_come_and_go_take_no_memory() -> None:
    finder = PassageFinder()
    finder.register(PASSAGES[0], None)
    for seed in range(100, 160):
        finder.register(prose(seed), None)
        finder.register(prose(seed), None)
        finder.forget(prose(seed), None)
        assert chunks(finder, ask(f"They say {prose(seed)}", seed)) == [prose(seed)]
        finder.forget(prose(seed), None)
    [registered] = finder._registered.values()
    assert len(registered.texts.data) < 2000 and len(registered.texts.names) < 4
    assert chunks(finder, ask(f"So: {PASSAGES[0]}", 7)) == [PASSAGES[0]]


LONG = st.sampled_from([*PASSAGES, PASSAGES[0][:150], PASSAGES[1][150:], "敏捷的棕色狐狸跳过了懒狗。" * 9])
BETWEEN = st.sampled_from(["\n\n", "\n", " ", "[1] ", "\n[12] ", "<source>", "</source>", " # # ", "é", "\ud83d"])
PARTS = st.one_of(LONG, LONG, BETWEEN)
TEXTS = st.lists(PARTS, min_size=1, max_size=8).map("".join)


@given(st.lists(st.tuples(TEXTS, st.sampled_from(["a", "b"])), min_size=2, max_size=8))
def test_what_is_found_was_sent_before_by_the_same_tenant(prompts: list[tuple[str, str]]) -> None:
    shared = PassageFinder()
    own: dict[str, PassageFinder] = defaultdict(PassageFinder)
    sent: dict[str, list[str]] = defaultdict(list)
    for number, (context, salt) in enumerate(prompts):
        text = ask(context, number)
        found = chunks(shared, text, salt)
        assert found == chunks(own[salt], text, salt)
        assert all(any(each in earlier for earlier in sent[salt]) for each in found)
        sent[salt].append(text)
    assert len(shared) == sum(map(len, own.values()))


@given(TEXTS.filter(lambda text: any(passage[:150] in text for passage in PASSAGES)))
def test_what_is_sent_three_times_is_reused(context: str) -> None:
    """After another beginning each time: the chunks of the second time are those of all later ones."""
    finder = PassageFinder()
    found = [chunks(finder, ask(context, number)) for number in range(4)]
    assert found[1] and found[1] == found[2] == found[3]
    finder = PassageFinder()
    assert [chunks(finder, context + "\n\nWho?") for _ in range(3)] == [[]] * 3  # the prefix cache has all of it


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 100))
def test_common_runs_are_the_longest(left: bytes, right: bytes, seed: int) -> None:
    """Against a search that tries everything: every run has the passage, and ends where the texts differ."""
    passage = prose(seed, 300).encode()
    texts = [(left + passage + right).decode("latin-1"), (right + passage + left).decode("latin-1")]
    first, second = (AnchoredText(text) for text in texts)
    index = TextIndex()
    index.add(first, [((0, len(first.data)), b"name")])
    comparison = Comparison(second, [], [index])
    for found in comparison._found:
        for place, number, begin in found.between(0, len(second.data)):
            start, stop = comparison._extended(place, index, number, begin, (0, len(second.data)))
            shift = -begin
            assert second.data[start:stop] == first.data[start + shift : stop + shift]
            assert start == 0 or start + shift == 0 or second.data[start - 1] != first.data[start + shift - 1]
            ends = stop == len(second.data) or stop + shift == len(first.data)
            assert ends or second.data[stop] != first.data[stop + shift]


def worst(kind: str, count: int) -> list[str]:
    """Return texts that are sent one after another, of about `count` characters."""
    rng = Random(count)
    dense = next(c for c in map(chr, range(33, 3000)) if len(AnchoredText(c * 40 + prose(1, 4000)).anchors) > 130)
    block, long = prose(3, 200), prose(4, count // 2)
    return {
        "ends of ends": [*(long[start:] for start in range(0, len(long), len(long) // 40)), f"{long[:-1]}?"],
        "repeated": [dense * count, dense * (count // 2) + "?" + dense * (count // 2)],
        "one anchor everywhere": [(dense * 34 + rng.choice("xyz")) * (count // 35) for _ in range(4)],
        "many candidates": ["".join(f"{block}{rng.random()}" for _ in range(count // 220)) for _ in range(4)],
        "near matches": [block * (count // 200) + end for end in "abcd"],
        "pieces": ["\n\n".join(f"{block}{rng.random()}" for _ in range(count // 222)) for _ in range(4)],
        "lines": ["\n".join(f"[{i}] {block}" for i in range(count // 222)) for _ in range(3)],
    }[kind]


@pytest.mark.parametrize(
    "kind",
    ["repeated", "one anchor everywhere", "many candidates", "near matches", "pieces", "lines", "ends of ends"],
)
def test_cost_is_linear(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what is compared, and in calls of functions: a text that is four times as long takes four times as many."""
    made = []

    class Noted(Comparison):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(search, "Comparison", Noted)

    def calls(count: int) -> int:
        known, number = PassageFinder(), 0

        def note(*_: Any) -> None:
            nonlocal number
            number += 1

        texts = [(text, [TextSection(split_text(text))]) for text in worst(kind, count)]
        sys.setprofile(note)
        try:
            for text, sections in texts:
                known.find(text, sections, None, True)
        finally:
            sys.setprofile(None)
        return number

    short, long = calls(20_000), calls(80_000)
    assert long < 6 * short + 1000
    assert made and all(each.spent < 12 * len(each.text.data) + 100_000 for each in made)
    assert all(8 * len(each.text.anchors) <= len(each.text.data) for each in made)
