"""Passages of a small world, and the ranking of what stands in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer

from tests.engine.engines import DEMO
from vllm_blend.blend.relevance.pages import PageWords
from vllm_blend.blend.relevance.passages import PromptPassages
from vllm_blend.blend.relevance.words import WordIndex, split_words

TOKENIZER = AutoTokenizer.from_pretrained(DEMO)

ADA = "Ada Brix was a chemist born in Wesgro in 1850. The family moved often."
ADA_LATER = "Later she founded Kejoux Works. She married Ole Finn."
WESGRO = "Wesgro is a city in Flaipia. It stands on the river Pamzou."
OTHER_CITY = "Shassrou is a city in Klivia. It stands on the river Chossbeas."
KEJOUX = "Kejoux Works makes clocks. Its director is Griol Maix."
PASSAGES = [OTHER_CITY, KEJOUX, ADA, ADA_LATER, WESGRO]
CONTINUES = (None, None, None, 2, None)


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


def chosen_text(texts: Sequence[str], question: str, count: int, **options: Any) -> list[str]:
    """Return the sentences that come first."""
    passages, ids = prompt_of(texts, question, **options)
    groups = passages.ranked_sentences()
    assert groups is not None
    spans = [span for group in groups for span in group]
    return [str(TOKENIZER.decode(ids[slice(*span)])).strip() for span in spans[:count]]
