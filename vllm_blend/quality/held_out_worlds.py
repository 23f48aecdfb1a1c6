"""Questions about generated worlds of one split: held out from training, and the test's from every choice as well."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from vllm_blend.pipeline.datasets import Sample, normalize_sample
from vllm_blend.pipeline.prompts import PROMPT_STYLES
from vllm_blend.quality.make_datasets import make_samples
from vllm_blend.quality.questions import Questions
from vllm_blend.quality.splits import Split
from vllm_blend.quality.worlds import STYLES

PART_WORLDS = 16  # measured together: their chunks are held in memory meanwhile


def held_out_questions(
    split: Split,
    families: int,
    worlds: str = STYLES[0],
    samples: int = 500,
    per_world: int = 3,
    first_world: int = 0,
    titles: bool = False,
    pages: bool = True,
) -> list[Questions]:
    """Return questions about worlds of a split, of `families` families each and of the style `worlds` ("plain" or
    "wild"), in parts of a few worlds. With `pages`, prompts say which passage continues which. The first `first_world`
    of these worlds are left out.

    Raises ValueError for what `make_samples` does not make.
    """
    if first_world < 0:
        raise ValueError(f"the first world is {first_world}: use 0 or more")
    skipped = first_world * per_world
    made = make_samples(split, families, worlds, skipped + samples, per_world, titles)[skipped:]
    name = f"{families} {'family' if families == 1 else 'families'}, {worlds}{', titled' if titles else ''}"
    name += "" if pages else ", without pages"
    style = PROMPT_STYLES["wikimqa" if titles else "musique"]
    size = PART_WORLDS * per_world
    found = [normalize_sample(raw, index) for index, raw in enumerate(made)]
    parts = [tuple(found[start : start + size]) for start in range(0, len(found), size)]
    return [Questions(name, style, part, pages=pages) for part in parts]


def world_of(sample_id: str) -> str:
    """Return the seed of the world that a sample of `held_out_questions`, "SPLIT-SEED-NUMBER", asks about."""
    return sample_id.split("-")[1]


def digest_of(samples: Iterable[Sample]) -> str:
    """Return a digest of what samples ask and of their passages: a change of the worlds' text shows in it."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(repr((sample.question, sample.answers, sample.passages)).encode())
    return digest.hexdigest()[:16]
