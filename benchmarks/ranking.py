"""Measure the host's work before a blend by `relevant_passages`: ranking passages by the words of a question.

    python -m benchmarks.ranking --passages 100 --tokens 512

Passages are cut out of generated worlds, so they are synthetic. Their words are read before the measurement, as in an
engine that has seen them. Prints milliseconds of process time: the least, the median and the largest, for ranking and
for choosing 15% of the tokens, and what reading the words of a new passage takes. They are absolute: compare them
within a run only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from transformers import AutoTokenizer

from vllm_blend.blend.relevance.passages import PromptPassages
from vllm_blend.blend.relevance.words import WordIndex
from vllm_blend.blend.selectors import make_selector
from vllm_blend.quality.splits import DEVELOPMENT
from vllm_blend.quality.worlds import question_episode


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="inputs/demo-model")
    parser.add_argument("--passages", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a passage")
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="number of the world, in the development split")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    rng = DEVELOPMENT.random(args.seed)
    passages, question = make_passages(tokenizer, rng, args.passages, args.tokens)
    index = WordIndex(tokenizer)
    for ids in passages:
        index.read(ids)  # the texts of single tokens are kept, too
    start = time.process_time()
    for number, ids in enumerate(passages):
        index.passage(str(number), ids)
    reading = 1e3 * (time.process_time() - start) / len(passages)
    bounds = tuple((number * args.tokens, (number + 1) * args.tokens) for number in range(args.passages))

    def read_words() -> Any:
        return [index.passage(str(number), ids) for number, ids in enumerate(passages)], index.question(question)

    selector = make_selector("relevant_passages")
    budget = int(0.15 * args.passages * args.tokens)

    def choose() -> None:
        found = selector.choose_spans(
            PromptPassages(bounds, (), (), read_words), lambda span: span[1] - span[0], budget
        )
        if found is None:
            raise SystemExit("the question finds no page: give another --seed")

    print(f"{args.passages} passages of {args.tokens} tokens, question of {len(question)} tokens, process time in ms")
    report("rank the pages", args.repeats, lambda: PromptPassages(bounds, (), (), read_words).ranked_pages())
    report("rank them and choose 15%", args.repeats, choose)
    print(f"read the words of a new passage: {reading:.2f}")


def make_passages(tokenizer: Any, rng: Random, count: int, length: int) -> tuple[list[list[int]], list[int]]:
    """Return `count` passages of `length` tokens each, cut out of the pages of worlds, and a question about one."""
    ids: list[int] = []
    question: list[int] = []
    while len(ids) < count * length:
        episode = question_episode(rng, 8)
        asked = next(each for each in episode.questions if each.kind == "1hop")
        question = question or tokenizer.encode(asked.text, add_special_tokens=False)
        for passage in episode.passages:
            ids += tokenizer.encode(passage.text + "\n\n", add_special_tokens=False)
    return [ids[number * length : (number + 1) * length] for number in range(count)], question


def report(name: str, repeats: int, work: Callable[[], object]) -> None:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - start))
    print(f"{name}: least {min(times):.2f}, median {statistics.median(times):.2f}, largest {max(times):.2f}")


if __name__ == "__main__":
    main()
