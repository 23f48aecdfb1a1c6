"""Synthetic worlds as text: pages whose later passages lean on the first, and questions about them.

The demo models were trained on them (`scripts/train`), in the formats of MuSiQue and 2WikiMultihopQA. A later passage
names its subject only as "She", "the firm" or by a surname that others share, so encoded on its own it loses what it is
about: full prefill answers nearly every question, plain KV reuse hardly any.
"""

from __future__ import annotations

from random import Random

from vllm_blend.pipeline.prompts import PROMPT_STYLES
from vllm_blend.quality.episodes import Episode, Passage, Question, StatedFact
from vllm_blend.quality.world_facts import make_world
from vllm_blend.quality.world_pages import write_pages
from vllm_blend.quality.world_questions import questions_about

__all__ = ["Episode", "Passage", "Question", "StatedFact", "question_episode"]


def question_episode(rng: Random, families: int | None = None, titles: bool | None = None) -> Episode:
    """Return one world's pages and questions. A family has about 5 passages, 210 tokens of the demo model.

    `families` is drawn from 1 to 3 if None, as for the demo model. `titles` shows page titles (the 2WikiMultihopQA
    form), in 30% if None. Raises ValueError for fewer than one family.
    """
    families = rng.choice([1, 2, 2, 3, 3]) if families is None else families
    world = make_world(rng, families)
    pages = write_pages(rng, world)
    titles = rng.random() < 0.3 if titles is None else titles
    passages = tuple(
        Passage(name if titles else "", text, name, part) for name, texts in pages for part, text in enumerate(texts)
    )
    instruction = PROMPT_STYLES["wikimqa" if titles else "musique"].instruction
    return Episode(instruction, passages, tuple(questions_about(world)))
