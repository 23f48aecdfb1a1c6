"""Passages of a small world, and the ranking of what stands in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer

from tests.engine.engines import DEMO
from vllm_blend.blend.relevance.pages import PageWords
from vllm_blend.blend.relevance.passages import PromptPassages, Span
from vllm_blend.blend.relevance.words import PassageWords, WordIndex, split_words

TOKENIZER = AutoTokenizer.from_pretrained(DEMO)

ADA = "Ada Brix was a chemist born in Wesgro in 1850. The family moved often."
ADA_LATER = "Later she founded Kejoux Works. She married Ole Finn."
WESGRO = "Wesgro is a city in Flaipia. It stands on the river Pamzou."
OTHER_CITY = "Shassrou is a city in Klivia. It stands on the river Chossbeas."
KEJOUX = "Kejoux Works makes clocks. Its director is Griol Maix."
PASSAGES = [OTHER_CITY, KEJOUX, ADA, ADA_LATER, WESGRO]
CONTINUES = (None, None, None, 2, None)


@dataclass(frozen=True)
class Link:
    """How a page leads to another: how strongly, by which of its words, and whether the question asks for it."""

    score: float = 0.0
    words: frozenset[str] = frozenset()
    is_asked_for: bool = False


def links_of(words: PageWords, best: int) -> list[Link]:
    """Return how a page leads to each page."""
    links, texts = words.links(best), words.pages[0][0]
    return [
        Link(score, frozenset(texts_of(texts, links.words.get(page, ()))), page in links.asked_for)
        for page, score in enumerate(links.scores)
    ]


def texts_of(passage: PassageWords, numbers: Iterable[int]) -> list[str]:
    """Return the words that have these numbers."""
    texts = list(passage.numbering)
    return [texts[number] for number in numbers]


def counts_of(passage: PassageWords) -> dict[str, int]:
    """Return how often a passage has each word."""
    numbers, counts = passage.words.tolist()
    return dict(zip(texts_of(passage, numbers), [count >> 1 for count in counts], strict=True))


def spans_of(passage: PassageWords) -> list[tuple[int, int]]:
    """Return where the sentences of a passage start and stop."""
    stops = passage.stops.tolist()
    return list(zip([0, *stops], stops, strict=False))


def words_by_sentence(passage: PassageWords) -> list[set[str]]:
    """Return the words of each sentence."""
    found: list[set[str]] = [set() for _ in passage.stops]
    for number, sentences in passage.sentences_with.items():
        for sentence in sentences:
            found[sentence].update(texts_of(passage, [number]))
    return found


def different_words(text: str) -> list[str]:
    return list(dict.fromkeys(split_words(text)))


def page_words(pages: Sequence[Sequence[str]], question: str) -> PageWords:
    """Return the words of pages, each a list of passages."""
    index = WordIndex(TOKENIZER)
    read = [[index.read(TOKENIZER.encode(text, add_special_tokens=False)) for text in page] for page in pages]
    return PageWords(read, different_words(question))


def prompt_of(
    texts: Sequence[str], question: str, continues: Sequence[int | None] = (), relevance: Sequence[Sequence[float]] = ()
) -> tuple[PromptPassages, list[int]]:
    """Return the passages of a prompt, behind a prefix of three tokens, and the token ids of all."""
    index, ids, bounds = WordIndex(TOKENIZER), [0, 0, 0], []
    for text in texts:
        start = len(ids)
        ids += TOKENIZER.encode(text, add_special_tokens=False)
        bounds.append((start, len(ids)))

    def read_words() -> tuple[list[Any], list[str]]:
        return [index.read(ids[start:stop]) for start, stop in bounds], different_words(question)

    return PromptPassages(tuple(bounds), tuple(continues), tuple(map(tuple, relevance)), read_words), ids


def groups_of(passages: PromptPassages) -> list[list[Span]]:
    """Return the groups of ranked sentences."""
    parts = passages.ranked_sentences()
    assert parts is not None
    return [group for part in parts for group in part]


def chosen_text(texts: Sequence[str], question: str, count: int, **options: Any) -> list[str]:
    """Return the sentences that come first."""
    passages, ids = prompt_of(texts, question, **options)
    spans = [span for group in groups_of(passages) for span in group]
    return [str(TOKENIZER.decode(ids[slice(*span)])).strip() for span in spans[:count]]
