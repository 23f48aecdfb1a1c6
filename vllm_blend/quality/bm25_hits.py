"""How often words alone find the answer: the share of questions whose answer BM25's first passages hold.

    python -m vllm_blend.quality.bm25_hits inputs/musique_s.json

Only questions with a passage that holds their answer count. If the file names pages, they are counted as well: a page
is ranked by its best passage, and holds what any of its passages holds, as a rule that computes whole pages sees it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.bm25 import BM25Retrieval
from vllm_blend.pipeline.config import RetrievalConfig
from vllm_blend.pipeline.datasets import Sample, load_dataset, normalize_sample
from vllm_blend.pipeline.retriever import Collection

RANKS = (1, 2, 3)


@dataclass(frozen=True)
class AnswerHits:
    """The number of questions whose answer is in their passages, and the share of them that the first `ranks` places
    answer."""

    questions: int
    ranks: tuple[int, ...]
    shares: tuple[float, ...]


def answer_hits(raws: Iterable[dict[str, Any]], ranks: tuple[int, ...] = RANKS, by_page: bool = False) -> AnswerHits:
    """Rank the passages (`by_page`: the pages) of every sample by BM25, and see which places hold an answer: its words
    as they are, in small or capital letters.

    Raises ValueError that names the field if a sample is not in the pipeline's format, or if no passage holds an
    answer.
    """
    best = [place for raw in raws if (place := _best_place(normalize_sample(raw), by_page)) is not None]
    if not best:
        raise ValueError("no passage holds an answer to its question: nothing can be counted")
    return AnswerHits(len(best), ranks, tuple(sum(place < rank for place in best) / len(best) for rank in ranks))


def _best_place(sample: Sample, by_page: bool) -> int | None:
    """Return the first place, from 0, of a passage or page that holds an answer; None if none does."""
    holders = {index for index, passage in enumerate(sample.passages) if _holds(passage.searchable, sample.answers)}
    collection = Collection(sample.sample_id, sample.passages)
    retrieval = BM25Retrieval(RetrievalConfig())
    ranking = [index for index, _ in retrieval.rank(retrieval.build_index(collection), collection, sample.question)]
    if not by_page:
        return next((place for place, index in enumerate(ranking) if index in holders), None)
    pages = [sample.passages[index].page_id or f"passage {index}" for index in range(len(sample.passages))]
    ranked = list(dict.fromkeys(pages[index] for index in ranking))
    return min((ranked.index(pages[index]) for index in holders), default=None)


def _holds(text: str, answers: Sequence[str]) -> bool:
    return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) for answer in answers)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure how often BM25's first passages hold the answer.")
    parser.add_argument("datasets", nargs="+", type=Path, metavar="FILE", help="data set in the pipeline's format")
    args = parser.parse_args(argv)
    try:
        for path in args.datasets:
            raws = load_dataset(path)
            for by_page in (False, True):
                hits = answer_hits(raws, by_page=by_page)
                shares = " / ".join(f"{100 * share:.1f}" for share in hits.shares)
                what = "pages" if by_page else "passages"
                print(
                    f"{path.name}: {shares}% in the first {' / '.join(map(str, hits.ranks))} {what}, of "
                    f"{hits.questions} questions of {len(raws)} whose answer is there"
                )
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
