"""Synthetic worlds as text: pages whose later passages lean on the first, and questions about them.

The demo model was trained on plain worlds (`scripts/train`), in the formats of MuSiQue and 2WikiMultihopQA. A later
passage names its subject only as "She", "the firm" or by a surname that others share, so encoded on its own it loses
what it is about: full prefill answers nearly every question, plain KV reuse hardly any.

In wild worlds a question's words do not lead to its passages as surely: names are shared, questions use other words
than the pages, or describe the subject instead of naming it, and some pages name subjects without saying anything
about them.
"""

from __future__ import annotations

from random import Random

from vllm_blend.pipeline.prompts import PROMPT_STYLES
from vllm_blend.quality.episodes import Episode, Passage, Question, StatedFact
from vllm_blend.quality.wild_pages import write_wild_pages
from vllm_blend.quality.wild_questions import wild_questions_about
from vllm_blend.quality.world_facts import make_world
from vllm_blend.quality.world_pages import write_pages
from vllm_blend.quality.world_questions import questions_about

__all__ = ["STYLES", "Episode", "Passage", "Question", "StatedFact", "question_episode"]

STYLES = ("plain", "wild")


def question_episode(
    rng: Random, families: int | None = None, titles: bool | None = None, style: str = "plain"
) -> Episode:
    """Return one world's pages and questions. A family has about 5 passages, 210 tokens of the demo model (wild: 250).

    `families` is drawn from 1 to 3 if None, as for the demo model. `titles` shows page titles (the 2WikiMultihopQA
    form), in 30% if None. `style` is one of STYLES. Raises ValueError for fewer than one family or another style.
    """
    if style not in STYLES:
        raise ValueError(f"worlds of style {style!r} are unknown: use one of {', '.join(STYLES)}")
    families = rng.choice([1, 2, 2, 3, 3]) if families is None else families
    wild = style == "wild"
    world = make_world(rng, families, shared_names=wild)
    pages = write_wild_pages(rng, world) if wild else write_pages(rng, world)
    titles = rng.random() < 0.3 if titles is None else titles
    passages = tuple(
        Passage(name if titles else "", text, name, part) for name, texts in pages for part, text in enumerate(texts)
    )
    questions = wild_questions_about(rng, world) if wild else questions_about(world)
    return Episode(PROMPT_STYLES["wikimqa" if titles else "musique"].instruction, passages, tuple(questions))
