"""Write inputs/{musique_s,wikimqa_s,samsum}.json: synthetic samples in the formats of the CacheBlend repository.

    python -m vllm_blend.quality.make_datasets --output-dir inputs

The files are a pure function of the seeds below, which are in the development split (`splits`): the demo model has
never seen them, but rules were chosen on them. Question kinds take turns: each has a third of the samples. Worlds of
two families have 8 to 12 passages, 10 on average.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tqdm import tqdm

from vllm_blend.pipeline.files import write_json
from vllm_blend.quality.dialogues import summary_episode
from vllm_blend.quality.splits import DEVELOPMENT
from vllm_blend.quality.worlds import Episode, Question, question_episode

KINDS = ("1hop", "cross", "2hop")
FAMILIES = 2
MUSIQUE_SEED, MUSIQUE_SAMPLES = 1_100_000, 150
WIKIMQA_SEED, WIKIMQA_SAMPLES = 1_200_000, 200
SAMSUM_SEED, SAMSUM_SAMPLES = 1_300_000, 200


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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write the synthetic data sets that come with the project.")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("inputs"), help="folder to write to (default: %(default)s)"
    )
    args = parser.parse_args(argv)
    for name, samples in tqdm(make_datasets().items(), desc="data sets", unit="file"):
        write_json(args.output_dir / name, samples)


if __name__ == "__main__":
    main()
