"""Synthetic dialogues with summaries in one of four styles, in the format of SAMSum with few-shot examples.

The summary of the last dialogue follows the style of the examples, so the answer depends on passages about other
people. As in `world_facts`, the order of the draws is part of the distribution that the demo model was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from vllm_blend.pipeline.prompts import PROMPT_STYLES
from vllm_blend.quality.episodes import Episode, Passage, Question
from vllm_blend.quality.world_facts import made_up_name

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
ITEMS = [
    "bread",
    "candles",
    "a ladder",
    "the tickets",
    "two chairs",
    "an old map",
    "the keys",
    "fresh milk",
    "a drum",
    "the letters",
]
DUTIES = [
    "fix the roof",
    "visit a sister",
    "clean the cellar",
    "finish a report",
    "walk the dog",
    "see the doctor",
    "paint a fence",
    "study for a test",
]
STYLES = (
    "{host} will be in {place} on {day}. {guest} has to {duty}.",
    "{guest} can not come because of a plan to {duty}. {host} will bring {item}.",
    "On {day} {host} goes to {place} and {guest} stays to {duty}.",
    "{host} brings {item} to {guest}.",
)


@dataclass(frozen=True)
class Dialogue:
    text: str
    host: str
    guest: str
    place: str
    item: str
    day: str
    duty: str

    def summary(self, style: str) -> str:
        return style.format(**vars(self))


def make_dialogue(rng: Random) -> Dialogue:
    """Return a dialogue of three lines: an invitation, a refusal, an offer."""
    host, guest, place = made_up_name(rng), made_up_name(rng), made_up_name(rng)
    item, day, duty = rng.choice(ITEMS), rng.choice(DAYS), rng.choice(DUTIES)
    lines = [
        rng.choice((f"{host}: Shall we meet in {place} on {day}?", f"{host}: Are you coming to {place} on {day}?")),
        rng.choice((f"{guest}: I would like to, but I have to {duty}.", f"{guest}: Sorry, that day I must {duty}.")),
        rng.choice((f"{host}: Then I will bring {item} to you.", f"{host}: All right, I can drop off {item}.")),
    ]
    return Dialogue("\n".join(lines), host, guest, place, item, day, duty)


def summary_episode(rng: Random, examples: int | None = None) -> Episode:
    """Return `examples` summarised dialogues (None: 2 to 5, drawn as in training) and one to summarise in their
    style."""
    examples = examples or rng.randint(2, 5)
    style = rng.choice(STYLES)
    passages = []
    for number in range(examples):
        dialogue = make_dialogue(rng)
        text = f"Dialogue: {dialogue.text}\nSummary: {dialogue.summary(style)}"
        passages.append(Passage("", text, page=f"example {number}", part=0))
    dialogue = make_dialogue(rng)
    question = Question("sum", f"Dialogue: {dialogue.text}", dialogue.summary(style))
    return Episode(PROMPT_STYLES["samsum"].instruction, tuple(passages), (question,))
