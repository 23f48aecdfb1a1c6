"""Words and sentences of passages: several scripts, code, numbers, and tokens without a tokenizer."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.blend.relevance.texts import counts_of, spans_of, texts_of, words_by_sentence
from tests.engine.engines import DEMO
from tests.engine.tiny_tokenizers import byte_fallback, byte_level, slow
from vllm_blend.blend.relevance.numbers import Numbering
from vllm_blend.blend.relevance.words import PassageWords, WordIndex, split_words

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Where was Ada Lovelace born?", ["where", "was", "ada", "lovelace", "born"]),
        ("def get_user_name(id: int) -> str:", ["def", "get_user_name", "id", "int", "str"]),
        ("In 1851, 12,345 people", ["in", "1851", "12", "345", "people"]),
        ("東京はどこ?", ["東京", "京は", "はど", "どこ"]),
        ("Tokyo 東 京都", ["tokyo", "東", "京都"]),
        ("서울시는", ["서울", "울시", "시는"]),
        ("Straße STRASSE", ["strasse", "strasse"]),
        ("... !?", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert split_words(text) == words


def sentences(tokenizer: Any, text: str) -> list[str]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = spans_of(WordIndex(tokenizer).read(ids))
    assert [start for start, _ in found] + [len(ids)] == [0] + [stop for _, stop in found]
    return [tokenizer.decode(ids[start:stop]) for start, stop in found]


def test_sentences(tokenizer: Any) -> None:
    assert sentences(tokenizer, "It is old. Was it 3.14 metres?\nYes!\n\n") == [
        "It is old.",
        " Was it 3.14 metres?",
        "\nYes!\n\n",
    ]
    assert sentences(tokenizer, 'She said "no." He left') == ['She said "no."', " He left"]
    assert sentences(tokenizer, "\n\n") == ["\n\n"]
    assert sentences(tokenizer, "no end") == ["no end"]


def passage(index: WordIndex, key: str, ids: list[int]) -> PassageWords:
    """Read a prompt of one passage."""
    [words], _ = index.prompt(ids, [(0, len(ids))], (0, 0), [key])
    return words


class Pieces:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.texts[token] for token in token_ids)


def bounds(tokenizer: Any, ids: list[int]) -> list[tuple[int, int]]:
    return spans_of(WordIndex(tokenizer).read(ids))


def test_a_token_may_end_a_sentence_and_have_the_space_behind_it() -> None:
    tokenizer: Any = Pieces("It is old. ", "Was it", "?) ", "No")
    assert bounds(tokenizer, [0, 1, 2, 3]) == [(0, 1), (1, 3), (3, 4)]


def test_sentences_reach_the_end_whatever_the_last_token_is(tokenizer: Any) -> None:
    """A special token has no text, and a part of a character is none."""
    ids = tokenizer.encode("It is old. It is so", add_special_tokens=False)
    special = WordIndex(tokenizer).read([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id])
    assert special.stops[-1] == len(ids) + 2 == special.num_tokens
    assert counts_of(special) == {"it": 2, "is": 2, "old": 1, "so": 1}
    part = tokenizer.encode("\U00020000", add_special_tokens=False)
    assert len(part) == 4
    assert bounds(tokenizer, ids + part[:2])[-1][1] == len(ids) + 2 and bounds(tokenizer, part[:2]) == [(0, 2)]
    assert (
        len(bounds(tokenizer, tokenizer.encode("\U00020000。京。", add_special_tokens=False))) == 2
    )  # a word of four tokens


def test_what_is_read(tokenizer: Any) -> None:
    ids = tokenizer.encode("Founded late. The founder left the firm.", add_special_tokens=False)
    words = WordIndex(tokenizer).read(ids)
    assert counts_of(words) == {"founded": 1, "late": 1, "the": 2, "founder": 1, "left": 1, "firm": 1}
    assert words.length == 7 and texts_of(words, words.head) == ["founded", "late"]
    assert words_by_sentence(words) == [{"founded", "late"}, {"the", "founder", "left", "firm"}]
    numbers, _ = words.words
    alike = numbers[words.numbering.stems_of(numbers) == words.numbering.stems["fou"]]
    assert sorted(texts_of(words, alike)) == ["founded", "founder"]
    assert dict(zip(*words.words.tolist(), strict=True))[words.numbering["founded"]] & 1  # in the first sentence
    assert not dict(zip(*words.words.tolist(), strict=True))[words.numbering["founder"]] & 1


def test_what_was_read_cannot_be_changed(tokenizer: Any) -> None:
    """Other prompts are ranked by it too, and a user's selector is given it."""
    words: Any = WordIndex(tokenizer).read(tokenizer.encode("Founded late.", add_special_tokens=False))
    with pytest.raises(TypeError, match="does not support item assignment"):
        words.sentences_with[0] = 7
    for array in (words.words, words.stops, words.head, words.lower, words.capitals, words.names):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 7


def test_without_a_tokenizer_tokens_are_words() -> None:
    words = WordIndex(None).read([7, 3, 7])
    assert counts_of(words) == {"7": 2, "3": 1}
    assert spans_of(words) == [(0, 3)]


def test_what_was_used_last_is_remembered(tokenizer: Any) -> None:
    index = WordIndex(tokenizer)
    sizes = [index.read(ids).num_bytes for ids in ([5, 6], [7], [8, 9])]
    index = WordIndex(tokenizer, max_passage_bytes=sum(sizes) - 1)
    first = passage(index, "a", [5, 6])
    passage(index, "b", [7])
    assert passage(index, "a", [5, 6]) is first
    passage(index, "c", [8, 9])  # "b" leaves
    assert passage(index, "a", [5, 6]) is first
    assert set(index._known) == {"a", "c"}
    ids = tokenizer.encode("How many " + " ".join(map(str, range(100))), add_special_tokens=False)
    long = passage(index, "long", ids)
    assert long.num_bytes > sum(sizes) and not index._known  # too large to be remembered


def test_a_prompt_is_read_whole_whatever_is_remembered(tokenizer: Any) -> None:
    """A passage that it has twice is read once, and one that leaves while others are read is read all the same."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in ("Ada left.", "Brix came.", "Who left, Ada?")]
    stops = [0, *accumulate(map(len, ids))]
    flat, (first, second, last) = [token for own in ids for token in own], list(pairwise(stops))
    for max_bytes in (1 << 20, 1):
        index = WordIndex(tokenizer, max_bytes)
        passages, question = index.prompt(flat, [first, second, first], last, ["a", "b", "a"])
        assert [list(counts_of(each)) for each in passages] == [["ada", "left"], ["brix", "came"], ["ada", "left"]]
        assert question == ["who", "left", "ada"]
        assert (passages[0] is passages[2]) == (max_bytes > 1) and len(index._known) == (2 if max_bytes > 1 else 0)


def test_a_prompt_behind_too_many_different_words_begins_with_none(tokenizer: Any) -> None:
    """Its passages have numbers of one numbering, also those that were read before."""
    ids = tokenizer.encode("Ada left early.", add_special_tokens=False)
    index = WordIndex(tokenizer, max_word_bytes=2)
    [first], _ = index.prompt(ids, [(0, len(ids))], (0, 0), ["a"])
    (again, other), _ = index.prompt(ids * 2, [(0, len(ids)), (len(ids), 2 * len(ids))], (0, 0), ["a", "b"])
    assert again is not first and counts_of(again) == counts_of(first)
    assert again.numbering is other.numbering is not first.numbering


def held_bytes(work: Callable[[], object]) -> int:
    """Return the memory that what `work` returns takes."""
    gc.collect()
    tracemalloc.start()
    kept = work()
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return held


@pytest.mark.parametrize(("lines", "most"), [(30, 1.5), (3000, 1.1)])
def test_a_passage_counts_by_the_memory_that_it_takes(lines: int, most: float) -> None:
    """Also one with a word on each line."""
    tokenizer: Any = Pieces("\n", *(f"w{number}" for number in range(lines)))
    ids = [token for number in range(lines) for token in (number + 1, 0)]
    index = WordIndex(tokenizer)
    words = index.read(ids)  # what all passages share
    held = held_bytes(lambda: index.read(ids))
    assert 0.9 * held <= words.num_bytes <= most * held


def test_a_passage_takes_memory_by_its_length() -> None:
    """However many lines it has: three times the words on three times the lines take three times as much."""
    tokenizer: Any = Pieces("\n", *(f"w{number}" for number in range(9000)))
    one, three = (
        WordIndex(tokenizer).read([token for number in range(lines) for token in (number + 1, 0)])
        for lines in (3000, 9000)
    )
    assert three.num_bytes < 3.3 * one.num_bytes


def test_what_is_remembered_is_bounded_by_memory() -> None:
    """Also where a passage has as many sentences as words."""
    tokenizer: Any = Pieces("\n", *(f"w{number}" for number in range(1000)))
    ids = [token for number in range(1000) for token in (number + 1, 0)]
    size = WordIndex(tokenizer).read(ids).num_bytes
    index = WordIndex(tokenizer, max_passage_bytes=3 * size)
    for number in range(5):
        passage(index, str(number), ids)
        assert sum(each.num_bytes for each in index._known.values()) == index._num_bytes <= 3 * size
    assert list(index._known) == ["2", "3", "4"]
    plain = WordIndex(tokenizer).read([token for token in ids if token])  # the same words in one sentence
    assert size > 2 * plain.num_bytes


@pytest.mark.parametrize("text", ["w{}", "{}" + "_" * 10_000, "{}京", "京{}" + "\U00020000" * 3])
def test_the_numbers_of_words_are_bounded_by_memory(text: str) -> None:
    """Also where the words are long, or all begin differently."""

    def fill() -> Numbering:
        numbering = Numbering()
        for number in range(2000):
            numbering[text.format(number)]
        return numbering

    held = held_bytes(fill)
    assert held <= fill().num_bytes <= 2 * held


def test_long_words_begin_a_new_numbering() -> None:
    tokenizer: Any = Pieces(*(f"{number}" + "_" * 10_000 for number in range(40)))
    index = WordIndex(tokenizer, max_word_bytes=100_000)
    sizes = []
    for number in range(40):
        passage(index, str(number), [number])
        sizes.append(index._numbering.num_bytes)
    assert max(sizes) < 100_000 + 11_000  # at most one prompt's words above the bound
    assert len(index._numbering) == 10 and len(index._known) == 10  # the last of four numberings


def test_passages_that_are_read_ahead_begin_a_new_numbering() -> None:
    """No prompt need come for that."""
    tokenizer: Any = Pieces(*(f"{number}" + "_" * 10_000 for number in range(40)))
    index = WordIndex(tokenizer, max_word_bytes=100_000)
    for number in range(40):
        index.learn(str(number), [number])
        assert index._numbering.num_bytes < 100_000 + 11_000
    read = list(index._known.values())
    assert len(read) == 10 and {each.numbering is index._numbering for each in read} == {True}
    assert index._num_bytes == sum(each.num_bytes for each in read)


def test_another_tokenizer_reads_all_anew() -> None:
    first: Any = Pieces("no ", "yes. ", "so")
    second: Any = Pieces("tea. ", "milk", "sugar")
    small = max(WordIndex(each).read(ids).num_bytes for each in (first, second) for ids in ([0, 1], [2]))
    index = WordIndex(first, max_passage_bytes=2 * small)
    assert counts_of(passage(index, "a", [0, 1])) == {"no": 1, "yes": 1}
    index.set_tokenizer(second)
    read = passage(index, "a", [0, 1])
    assert counts_of(read) == {"tea": 1, "milk": 1} and len(read.stops) == 2
    passage(index, "b", [2])
    assert set(index._known) == {"a", "b"}  # what was forgotten takes no room


@pytest.mark.parametrize("make", [byte_level, byte_fallback, slow])
def test_tokens_are_decoded_in_linear_time(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that decode to nothing, and bytes that are no character."""
    tokenizer, decoded = make(), 0
    byte = tokenizer.encode("é", add_special_tokens=False)[-1]
    decode = tokenizer.decode

    def counted(token_ids: list[int], **options: Any) -> Any:
        nonlocal decoded
        decoded += len(token_ids)
        return decode(token_ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    special = tokenizer.all_special_ids[0]
    for ids in ([special] * 200, [byte] * 200, [special] * 4 + [byte] * 196, [special, byte] * 100):
        words = WordIndex(tokenizer).read(ids)
        assert words.num_tokens == 200
    assert decoded <= 4 * 200 * 5  # sentences, and up to four times each token that is a part of a character


def test_words_that_stand_in_lower_case(tokenizer: Any) -> None:
    ids = tokenizer.encode("The Firm sold clocks. The firm's 7 Clocks tick. 京都", add_special_tokens=False)
    words = WordIndex(tokenizer).read(ids)
    lower, names = set(texts_of(words, words.lower)), set(texts_of(words, words.names))
    assert lower >= {"sold", "clocks", "firm", "s", "tick"} and not lower & {"the", "7", "京都"}
    assert names >= {"7"} and not names & {"the", "firm", "clocks", "tick"}
    capitals = [*zip(texts_of(words, words.capitals[0]), words.capitals[1].tolist(), strict=True)]
    assert {("the", 0), ("the", 1), ("7", 1)} <= set(capitals) and "firm" not in dict(capitals)
