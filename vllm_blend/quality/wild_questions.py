"""Questions about a wild world: in other words than its pages, about subjects that are named in short or described.

A question has one answer: a subject is called only by what no other subject of the world could be called by.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

from vllm_blend.quality.episodes import Question, StatedFact
from vllm_blend.quality.world_facts import City, Company, Person, World
from vllm_blend.quality.world_questions import PHRASES, relations

FULL_NAMES = 0.3  # the share of questions that call their subject by its full name
KINDS = ("1hop", "cross", "2hop")  # from few to many passages


@dataclass(frozen=True)
class Reference:
    """A way to call a subject. `topics` are the facts that a description rests on, stated in `evidence`; names have
    none."""

    text: str
    topics: tuple[str, ...] = ()
    evidence: tuple[StatedFact, ...] = ()


def wild_questions_about(rng: Random, world: World) -> list[Question]:
    """Return a question for every relation of the world's subjects, with the facts that it needs."""
    founders = {person.company.name: person for person in world.people}
    found = [(subject, _references(subject, founders), asked) for subject, asked in relations(world)]
    meanings = Counter(reference.text for _, references, _ in found for reference in references)
    meanings.update(_other_names(world))
    questions: dict[str, Question] = {}  # by text: what is asked of a founder may also be asked of the firm
    for subject, references, asked in found:
        clear = [reference for reference in references if meanings[reference.text] == 1]
        for relation in asked:
            fitting = [r for r in clear if not {relation.topic, relation.through} & set(r.topics)]
            called = rng.choice(fitting) if fitting and rng.random() > FULL_NAMES else Reference(subject.name)
            evidence = relation.evidence + called.evidence
            text = rng.choice(PHRASES[relation.topic]).format(called.text)
            kind = max(relation.kind, _kind(evidence), key=KINDS.index)
            questions.setdefault(text, Question(kind, text, relation.answer, evidence))
    return list(questions.values())


def _references(subject: Person | Company | City, founders: dict[str, Person]) -> list[Reference]:
    """Return what a subject may be called instead of its full name, if no other subject is called the same."""
    first, later = (StatedFact(subject.name, False),), (StatedFact(subject.name, True),)
    if isinstance(subject, Person):
        return [
            Reference(subject.surname),
            Reference(
                f"the {subject.occupation} whose life began in {subject.year}", ("occupation", "birth year"), first
            ),
            Reference(f"the {subject.occupation} from {subject.birthplace.name}", ("occupation", "birthplace"), first),
            Reference(f"the {subject.occupation} who founded {subject.company.name}", ("occupation", "company"), later),
            Reference(f"the founder of {subject.company.name}", ("company",), later),
            Reference(f"the spouse of {subject.spouse}", ("spouse",), later),
            Reference(f"the author of the book about {subject.book}", ("book",), later),
        ]
    if isinstance(subject, Company):
        founder = founders[subject.name].name
        return [
            Reference(subject.short_name),
            Reference(f"the firm of {founder}", ("founder",), (StatedFact(founder, True),)),
            Reference(f"the firm that {subject.director} manages", ("director",), later),
            Reference(f"the maker of {subject.product}", ("product",), first),
        ]
    return [
        Reference(f"the city on the {subject.river}", ("river",), later),
        Reference(f"the town that {subject.mayor} governs", ("mayor",), later),
        Reference(f"the home of the {subject.festival} festival", ("festival",), later),
    ]


def _other_names(world: World) -> list[str]:
    """Return the names of cities, and the surnames of those who have no page: nothing else may be called so."""
    people = [person.spouse for person in world.people] + [company.director for company in world.companies]
    people += [city.mayor for city in world.cities]
    return [city.name for city in world.cities] + [name.split()[1] for name in people]


def _kind(evidence: tuple[StatedFact, ...]) -> str:
    """Return the kind of a question that needs these facts."""
    if len({fact.page for fact in evidence}) > 1:
        return "2hop"
    return "cross" if any(fact.later for fact in evidence) else "1hop"
