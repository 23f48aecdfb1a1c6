"""Measure what it costs to find known passages in a prompt: `python -m benchmarks.passage_finder`.

A finder knows `--passages` passages of about 600 characters. Prompts of about 32,000 tokens (130,000 characters) are
looked through: of known passages between blank lines, with numbers before them, within sentences, in single lines, and
of passages that are new. Times are CPU time of the one thread that does it, the minimum of `--runs` prompts of a kind;
`split` is the search for separators, `find` the rest. With `--against`, another checkout of this project is measured by
the same file, in turns (this, other, other, this).
"""

from __future__ import annotations

import argparse
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from vllm_blend.entrypoints.openai.passages.finder import PassageFinder, TextSection
from vllm_blend.entrypoints.openai.passages.text_pieces import split_text

LENGTH, COUNT = 600, 216  # characters of a passage, and passages of a prompt
ASKED = "Who?"


def make_writer(rng: Random) -> Callable[[], str]:
    """Return a function that returns a new passage of random words each time."""
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 10))) for _ in range(20_000)]
    return lambda: " ".join(rng.choices(words, k=LENGTH // 6))[:LENGTH].strip() + "."


def make_finder(passages: Sequence[str]) -> PassageFinder:
    """Return a finder that has seen all passages."""
    limits: dict[str, Any] = {"max_passages": 4 * len(passages), "max_bytes": 1 << 28}
    known = inspect.signature(PassageFinder).parameters  # another checkout may lack one of them
    finder = PassageFinder(**{name: value for name, value in limits.items() if name in known})
    for start in range(0, len(passages), COUNT):
        find(finder, "\n\n".join(["Read.", *passages[start : start + COUNT], ASKED]))
    return finder


def find(finder: PassageFinder, text: str) -> tuple[float, float, float]:
    """Return the seconds that the search for separators takes, and the rest, and the known share of the text."""
    begin = time.thread_time()
    pieces = split_text(text)
    middle = time.thread_time()
    found = finder.find(text, [TextSection(pieces, num_kept=1)], None, False)
    end = time.thread_time()
    return middle - begin, end - middle, sum(stop - start for start, stop in found.chunks) / len(text)


def measure(num_passages: int, runs: int) -> None:
    rng = Random(3)
    write = make_writer(rng)
    passages = [write() for _ in range(num_passages)]
    finder = make_finder(passages)

    def some() -> list[str]:
        return rng.sample(passages, COUNT)

    kinds: dict[str, Callable[[], list[str]]] = {
        "between blank lines": some,
        "numbered": lambda: [f"[{number}] {text}" for number, text in enumerate(some(), 1)],
        "within sentences": lambda: [f"On page {rng.randrange(1000)} we read: {text}" for text in some()],
        "in single lines": lambda: ["\n".join(some())],
        "new": lambda: [write() for _ in range(COUNT)],
    }
    for name, make in kinds.items():
        rows = [find(finder, "\n\n".join(["Read.", *make(), ASKED])) for _ in range(runs)]
        split, rest = (1000 * min(row[number] for row in rows) for number in range(2))
        print(f"{name:20} split {split:5.2f} ms, find {rest:5.2f} ms, together {split + rest:5.2f} ms; ", end="")
        print(f"{rows[-1][2]:4.0%} known")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.passage_finder", description=__doc__)
    parser.add_argument("--passages", type=int, default=100_000, help="known passages")
    parser.add_argument("--runs", type=int, default=40, help="prompts of each kind")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout to measure in turns")
    args = parser.parse_args(arguments)
    if args.against is None:
        measure(args.passages, args.runs)
        return
    this = Path(__file__).resolve().parents[1]
    for checkout in (this, args.against, args.against, this):
        print(f"{checkout}:", flush=True)
        command = [sys.executable, __file__, "--passages", str(args.passages), "--runs", str(args.runs)]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(checkout.resolve())}, check=True)


if __name__ == "__main__":
    main()
