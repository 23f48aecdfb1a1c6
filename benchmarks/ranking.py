"""Measure the host's work before a blend by `relevant_passages`: ranking passages by the words of a question.

    python -m benchmarks.ranking --passages 100 --tokens 512 45

Passages are cut out of generated worlds, so they are synthetic. Each prompt has a question of its own, as the demo
model reads it, and a choice of the worlds' passages in an order that was not seen before. The words of each passage
were read before, as in an engine that has seen it. A prompt is measured once. Times are those of prompts whose question
finds a page, as the others are done sooner; "found a page" says how many. Choosing takes 15% of the tokens, and looks
up what each span costs as a plan does.

Prints milliseconds of process time as "least / median / nine tenths are below", and what reading the words of a new
passage takes. They are absolute: compare them within a run only.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from random import Random
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from benchmarks.samples import record
from vllm_blend.blend.relevance.passages import PromptPassages
from vllm_blend.blend.relevance.words import WordIndex
from vllm_blend.blend.selectors import make_selector
from vllm_blend.pipeline.prompts import PROMPT_STYLES
from vllm_blend.quality.episodes import Question
from vllm_blend.quality.splits import DEVELOPMENT
from vllm_blend.quality.worlds import question_episode

POOL = 3  # times the passages of a prompt: those of all prompts
RATIO = 0.15
Work = Callable[[PromptPassages], object]  # None if the question finds no page


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default="inputs/demo-model")
    parser.add_argument("--passages", type=int, default=100)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 45], help="tokens of a passage")
    parser.add_argument("--per-page", type=int, nargs="+", default=[1, 3], help="passages of a page")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="number of the world, in the development split")
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    print(f"{args.passages} passages, {args.prompts} prompts, process time in ms: least / median / 90%\n")
    choosing = f"rank and choose {RATIO:.0%}"
    print(f"| tokens | a page | rank the pages | {choosing} | found a page | read a new passage |")
    print("|---|---|---|---|---|---|")
    for tokens in args.tokens:
        rng = DEVELOPMENT.random(args.seed)
        passages, questions = make_pool(tokenizer, rng, POOL * args.passages, tokens)
        index = WordIndex(tokenizer)
        for ids in passages:
            index.read(ids)  # the texts of single tokens are kept, too
        reading = [
            timed(index.prompt, ids, [(0, len(ids))], (0, 0), [str(number)]) for number, ids in enumerate(passages)
        ]
        texts = [PROMPT_STYLES["musique"].suffix(each.text) for each in questions]
        asked = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        for per_page in args.per_page:
            prompts = make_prompts(index, passages, asked, rng, args.passages, per_page)
            name = f"{tokens} tokens, {per_page} a page"
            ranked, num_found = measure(f"rank: {name}", PromptPassages.ranked_pages, prompts, args.prompts)
            chosen, _ = measure(f"choose: {name}", make_choice(tokens * args.passages), prompts, args.prompts)
            found = f"{num_found} of {args.prompts}"
            print(f"| {tokens} | {per_page} | {ranked} | {chosen} | {found} | {summary(reading)} |", flush=True)


def make_passages(tokenizer: Any, rng: Random, count: int, length: int) -> tuple[list[list[int]], list[int]]:
    """Return `count` passages of `length` tokens each, cut out of the pages of worlds, and a question about one."""
    passages, questions = make_pool(tokenizer, rng, count, length)
    asked = next(each for each in questions if each.kind == "1hop")
    return passages, tokenizer.encode(asked.text, add_special_tokens=False)


def make_pool(tokenizer: Any, rng: Random, count: int, length: int) -> tuple[list[list[int]], list[Question]]:
    """Return `count` passages of `length` tokens each, cut out of the pages of worlds, and all questions about them."""
    ids: list[int] = []
    questions: list[Question] = []
    while len(ids) < count * length:
        episode = question_episode(rng, 8)
        questions += episode.questions
        for passage in episode.passages:
            ids += tokenizer.encode(passage.text + "\n\n", add_special_tokens=False)
    return [ids[number * length : (number + 1) * length] for number in range(count)], questions


def make_prompts(
    index: WordIndex,
    passages: Sequence[Sequence[int]],
    questions: Sequence[Sequence[int]],
    rng: Random,
    count: int,
    per_page: int,
) -> Iterator[PromptPassages]:
    """Yield prompts of `count` passages that ask one of `questions`, their pages in any order."""
    length = len(passages[0])
    bounds = tuple((number * length, (number + 1) * length) for number in range(count))
    continues = tuple(number - 1 if number % per_page else None for number in range(count))
    pages = [range(first, first + per_page) for first in range(0, len(passages) - per_page + 1, per_page)]
    while True:
        numbers = [number for page in rng.sample(pages, -(-count // per_page)) for number in page][:count]
        ids = [*itertools.chain.from_iterable(passages[number] for number in numbers), *rng.choice(questions)]
        read_words = partial(index.prompt, ids, bounds, (bounds[-1][1], len(ids)), list(map(str, numbers)))
        yield PromptPassages(bounds, continues, (), read_words)


def make_choice(num_tokens: int) -> Work:
    """Return what chooses passages of a prompt of `num_tokens`."""
    selector, budget = make_selector("relevant_passages"), int(RATIO * num_tokens)
    is_candidate = np.ones(num_tokens, bool)

    def choose(prompt: PromptPassages) -> object:
        return selector.choose_spans(prompt, lambda span: int(np.count_nonzero(is_candidate[slice(*span)])), budget)

    return choose


def measure(name: str, work: Work, prompts: Iterator[PromptPassages], count: int) -> tuple[str, int]:
    """Return the times that some work takes with `count` prompts, and for how many of them it found a page."""
    times = []
    for prompt in itertools.islice(prompts, count):
        start = time.process_time()
        found = work(prompt)
        taken = time.process_time() - start
        if found is not None:
            times.append(taken)
    if not times:
        raise SystemExit(f"{name}: no question finds a page: give another --seed")
    record(name, times)
    return summary(times), len(times)


def timed(work: Callable[..., object], *args: object) -> float:
    start = time.process_time()
    work(*args)
    return time.process_time() - start


def summary(seconds: Sequence[float]) -> str:
    """Return the least and the median of some times, and what nine tenths of them are below, in milliseconds."""
    nine_tenths = sorted(seconds)[int(0.9 * (len(seconds) - 1))]
    return " / ".join(f"{1e3 * each:.2f}" for each in (min(seconds), statistics.median(seconds), nine_tenths))


if __name__ == "__main__":
    main()
