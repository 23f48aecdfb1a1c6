"""Write inputs/{musique_s,wikimqa_s,samsum}.json: synthetic samples in the formats of the CacheBlend repository.

    python -m vllm_blend.quality.make_datasets --output-dir inputs

or, for measuring, questions about worlds of any size that nothing else has used:

    python -m vllm_blend.quality.make_datasets --split development --families 4 --output-dir my-data

The three files are a pure function of the seeds below. These are in the development split (`splits`): the demo model
has never seen them, but rules were chosen on them. Question kinds take turns: each has a third of the samples. Worlds
of two families have 8 to 12 passages, 10 on average.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tqdm.auto import tqdm

from vllm_blend.pipeline.files import write_json
from vllm_blend.quality.dialogues import summary_episode
from vllm_blend.quality.splits import DEVELOPMENT, SPLITS, TEST, TRAINING, Split
from vllm_blend.quality.worlds import Episode, Question, question_episode

KINDS = ("1hop", "cross", "2hop")
FAMILIES = 2
MUSIQUE_SEED, MUSIQUE_SAMPLES = 1_100_000, 150
WIKIMQA_SEED, WIKIMQA_SAMPLES = 1_200_000, 200
SAMSUM_SEED, SAMSUM_SAMPLES = 1_300_000, 200
MOST_FAMILIES = 8
WORLDS_PER_CELL = 50_000  # of each number of families; a split's first 50,000 worlds are for other uses


def musique_sample(index: int) -> dict[str, Any]:
    """Return sample `index` of musique_s: passages without titles, a flat list of answers."""
    return _qa_sample("musique_s", MUSIQUE_SEED, index, titles=False)


def wikimqa_sample(index: int) -> dict[str, Any]:
    """Return sample `index` of wikimqa_s: titled passages, and answers as that file has them, a list of lists of
    spellings."""
    sample = _qa_sample("wikimqa_s", WIKIMQA_SEED, index, titles=True)
    return {**sample, "answers": [sample["answers"]]}


def samsum_sample(index: int) -> dict[str, Any]:
    """Return sample `index` of samsum: two to five summarised dialogues as passages, a dialogue to summarise as the
    question.

    The dialogue ends with "Summary:", because few-shot prompts append the question as it is.
    """
    episode = summary_episode(Random(DEVELOPMENT.checked(SAMSUM_SEED + index)))
    question = episode.questions[0]
    sample = _as_sample(f"samsum-{index:03d}", episode, question)
    return {**sample, "question": f"{question.text}\nSummary:"}


def _qa_sample(name: str, seed: int, index: int, titles: bool) -> dict[str, Any]:
    rng = Random(DEVELOPMENT.checked(seed + index))
    episode = question_episode(rng, FAMILIES, titles)
    question = rng.choice([q for q in episode.questions if q.kind == KINDS[index % len(KINDS)]])
    return {**_as_sample(f"{name}-{index:03d}", episode, question), "gold": episode.gold(question)}


def _as_sample(sample_id: str, episode: Episode, question: Question) -> dict[str, Any]:
    return {
        "id": sample_id,
        "ctxs": [{"title": p.title, "text": p.text, "page_id": p.page} for p in episode.passages],
        "question": question.text,
        "answers": [question.answer],
        "kind": question.kind,
    }


def make_datasets() -> dict[str, list[dict[str, Any]]]:
    """Return the samples by file name."""
    return {
        "musique_s.json": [musique_sample(i) for i in range(MUSIQUE_SAMPLES)],
        "wikimqa_s.json": [wikimqa_sample(i) for i in range(WIKIMQA_SAMPLES)],
        "samsum.json": [samsum_sample(i) for i in range(SAMSUM_SAMPLES)],
    }


def make_samples(split: Split, families: int, samples: int) -> list[dict[str, Any]]:
    """Return questions about new worlds of a split, one about each, whose kinds take turns.

    Each number of families has worlds of its own. Raises ValueError for a number out of range, and for the training
    split, whose worlds come in streams.
    """
    if split is TRAINING:
        raise ValueError("models are trained on the training split: measure on development or test")
    if not 1 <= families <= MOST_FAMILIES:
        raise ValueError(f"the number of families is {families}: use 1 to {MOST_FAMILIES} (about 5 to 40 passages)")
    if not 1 <= samples <= WORLDS_PER_CELL:
        raise ValueError(f"the number of samples is {samples}: use 1 to {WORLDS_PER_CELL}")
    made: list[dict[str, Any]] = []
    for number in range(samples):
        index = WORLDS_PER_CELL * families + number
        rng = split.random(index)
        episode = question_episode(rng, families, titles=False)
        question = rng.choice([q for q in episode.questions if q.kind == KINDS[number % len(KINDS)]])
        sample = _as_sample(f"{split.name}-{split.seed(index)}", episode, question)
        made.append({**sample, "gold": episode.gold(question)})
    return made


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Write the synthetic data sets that come with the project or, with --split, questions about new "
        "worlds."
    )
    add = parser.add_argument
    add("--output-dir", type=Path, default=Path("inputs"), help="folder to write to (default: %(default)s)")
    add("--split", choices=[DEVELOPMENT.name, TEST.name], help="write questions about new worlds of this split")
    add("--families", type=int, default=4, help="with --split: 1 to 8, 5 passages each (default: %(default)s)")
    add("--samples", type=int, default=500, help="with --split: number of questions (default: %(default)s)")
    args = parser.parse_args(argv)
    changed = [name for name in ("families", "samples") if getattr(args, name) != parser.get_default(name)]
    if args.split is None and changed:
        parser.error(f"--{changed[0]} is for new worlds: give --split too")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    if args.split is None:
        for name, samples in tqdm(make_datasets().items(), desc="data sets", unit="file"):
            write_json(args.output_dir / name, samples)
        return
    try:
        made = make_samples(SPLITS[args.split], args.families, args.samples)
        path = args.output_dir / f"musique_{args.split}_{args.families}.json"
        write_json(path, made)
    except (OSError, ValueError) as error:
        print(f"make_datasets: error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{len(made)} questions: {path}")


if __name__ == "__main__":
    main()
