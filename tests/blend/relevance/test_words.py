"""Words and sentences of passages: several scripts, code, numbers, and tokens without a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.engine.engines import DEMO
from tests.engine.tiny_tokenizers import byte_fallback, byte_level, slow
from vllm_blend.blend.relevance.words import WordIndex, split_words

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
    found = WordIndex(tokenizer).read(ids).sentences
    assert [found[0].start, *(s.stop for s in found)] == [*(s.start for s in found), len(ids)]
    return [tokenizer.decode(ids[sentence.start : sentence.stop]) for sentence in found]


def test_sentences(tokenizer: Any) -> None:
    assert sentences(tokenizer, "It is old. Was it 3.14 metres?\nYes!\n\n") == [
        "It is old.",
        " Was it 3.14 metres?",
        "\nYes!\n\n",
    ]
    assert sentences(tokenizer, 'She said "no." He left') == ['She said "no."', " He left"]
    assert sentences(tokenizer, "\n\n") == ["\n\n"]
    assert sentences(tokenizer, "no end") == ["no end"]


class Pieces:
    """A tokenizer whose tokens are these texts."""

    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(self.texts[token] for token in token_ids)


def bounds(tokenizer: Any, ids: list[int]) -> list[tuple[int, int]]:
    return [(sentence.start, sentence.stop) for sentence in WordIndex(tokenizer).read(ids).sentences]


def test_a_token_may_end_a_sentence_and_have_the_space_behind_it() -> None:
    tokenizer: Any = Pieces("It is old. ", "Was it", "?) ", "No")
    assert bounds(tokenizer, [0, 1, 2, 3]) == [(0, 1), (1, 3), (3, 4)]


def test_sentences_reach_the_end_whatever_the_last_token_is(tokenizer: Any) -> None:
    """A special token has no text, and a part of a character is none."""
    ids = tokenizer.encode("It is old. It is so", add_special_tokens=False)
    special = WordIndex(tokenizer).read([tokenizer.bos_token_id, *ids, tokenizer.eos_token_id])
    assert [sentence.stop for sentence in special.sentences][-1] == len(ids) + 2 == special.num_tokens
    assert special.counts == {"it": 2, "is": 2, "old": 1, "so": 1}
    part = tokenizer.encode("\U00020000", add_special_tokens=False)
    assert len(part) == 4
    assert bounds(tokenizer, ids + part[:2])[-1][1] == len(ids) + 2 and bounds(tokenizer, part[:2]) == [(0, 2)]
    assert (
        len(bounds(tokenizer, tokenizer.encode("\U00020000。京。", add_special_tokens=False))) == 2
    )  # a word of four tokens


def test_what_is_read(tokenizer: Any) -> None:
    ids = tokenizer.encode("Founded late. The founder left the firm.", add_special_tokens=False)
    words = WordIndex(tokenizer).read(ids)
    assert words.counts == {"founded": 1, "late": 1, "the": 2, "founder": 1, "left": 1, "firm": 1}
    assert words.stem_counts["fou"] == 2 and words.length == 7
    assert words.sentences[1].places == {"the": 0, "founder": 1, "left": 2, "firm": 4}
    assert words.sentences[0].stems == {"fou", "lat"}


def test_what_was_read_cannot_be_changed(tokenizer: Any) -> None:
    """Other prompts are ranked by it too, and a user's selector is given it."""
    words: Any = WordIndex(tokenizer).read(tokenizer.encode("Founded late.", add_special_tokens=False))
    for mapping in (words.counts, words.stem_counts, words.sentences[0].places):
        with pytest.raises(TypeError, match="does not support item assignment"):
            mapping["late"] = 7


def test_without_a_tokenizer_tokens_are_words() -> None:
    words = WordIndex(None).read([7, 3, 7])
    assert words.counts == {"7": 2, "3": 1}
    assert [(s.start, s.stop) for s in words.sentences] == [(0, 3)]


def test_what_was_used_last_is_remembered(tokenizer: Any) -> None:
    index = WordIndex(tokenizer, max_tokens=36)  # each passage counts 16 besides its tokens
    first = index.passage("a", [5, 6])
    index.passage("b", [7])
    assert index.passage("a", [5, 6]) is first
    index.passage("c", [8, 9])  # "b" leaves
    assert index.passage("a", [5, 6]) is first
    assert set(index._known) == {"a", "c"}
    assert index.passage("long", [5] * 21).num_tokens == 21 and not index._known  # too long to be remembered


def test_another_tokenizer_reads_all_anew() -> None:
    first: Any = Pieces("no ", "yes. ", "so")
    second: Any = Pieces("tea. ", "milk", "sugar")
    index = WordIndex(first, max_tokens=35)
    assert index.passage("a", [0, 1]).counts == {"no": 1, "yes": 1}
    index.set_tokenizer(second)
    read = index.passage("a", [0, 1])
    assert read.counts == {"tea": 1, "milk": 1} and len(read.sentences) == 2
    index.passage("b", [2])
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
    assert WordIndex(tokenizer).read(ids).lower >= {"sold", "clocks", "firm", "s", "tick"}
    assert not WordIndex(tokenizer).read(ids).lower & {"the", "7", "京都"}
    assert WordIndex(tokenizer).read(ids).names >= {"7"}
    assert not WordIndex(tokenizer).read(ids).names & {"the", "firm", "clocks", "tick"}
