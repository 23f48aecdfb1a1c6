"""What a synthetic world becomes: passages, and questions about them, with the facts that each question needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Passage:
    """One passage of a page. `page` is the name of its subject; `title` is what the prompt shows, or "" for none."""

    title: str
    text: str
    page: str
    part: int  # position of the passage in its page; 0 names the subject in full


@dataclass(frozen=True)
class StatedFact:
    """A fact stated on a page: in its first passage, or (`later`) in a passage that leans on the first."""

    page: str
    later: bool


@dataclass(frozen=True)
class Question:
    """A question of a kind: "1hop" (one passage), "cross" (across the passages of a page), "2hop" (two pages) or "sum"
    (a summary)."""

    kind: str
    text: str
    answer: str
    evidence: tuple[StatedFact, ...] = ()


@dataclass(frozen=True)
class Episode:
    """An instruction, the passages in prompt order, and everything that can be asked about them."""

    instruction: str
    passages: tuple[Passage, ...]
    questions: tuple[Question, ...]

    def gold(self, question: Question) -> list[int]:
        """Return the indices, ascending, of the passages that state the needed facts or name their subjects; [] if
        none."""
        reach: dict[str, int] = {}
        for item in question.evidence:
            reach[item.page] = max(reach.get(item.page, 0), int(item.later))
        return [i for i, p in enumerate(self.passages) if p.part <= reach.get(p.page, -1)]
