"""Synthetic worlds as text: pages whose later passages lean on the first, and questions about them.

The demo model was trained on this distribution (`scripts/train`), in the formats of MuSiQue and 2WikiMultihopQA. A
later passage names its subject only as "She", "the firm" or by a surname that others share, so encoded on its own it
loses what it is about: full prefill answers nearly every question, plain KV reuse hardly any.

As in `world_facts`, the order of the draws is part of the distribution.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from vllm_blend.pipeline.prompts import PROMPT_STYLES
from vllm_blend.quality.world_facts import City, Company, Person, World, make_world

PERSON_FILLERS = [
    "The family moved often and money was short.",
    "School came late, and the lessons were few.",
    "Letters from those years have survived in part.",
    "A teacher soon noticed an unusual gift for detail.",
    "Little else is recorded before the war.",
    "Friends remembered a quiet and patient nature.",
]
COMPANY_FILLERS = [
    "Early ledgers show steady growth.",
    "The first workshop had a single window.",
    "Demand was strong from the start.",
    "The anniversary was marked with a dinner.",
    "A fire destroyed many of the papers.",
    "Wages were paid on the last day of the month.",
]
CITY_FILLERS = [
    "Most of the houses are built of brick.",
    "For centuries there was a weekly market.",
    "Visitors come mainly in the spring.",
    "Several songs from that time are still known.",
    "The old walls were taken down long ago.",
    "The station is a short walk from the square.",
]


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


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _person_page(rng: Random, person: Person) -> list[str]:
    """Write two passages. The second calls the person by a pronoun or by surname, and its sentences are shuffled."""
    name, year, city = person.name, person.year, person.birthplace.name
    subject = rng.choice(("She" if person.female else "He", person.surname, person.surname))
    within = subject if subject == person.surname else subject.lower()
    possessive = "Her" if person.female else "His"
    occupation = _article(person.occupation)
    first = [
        rng.choice(
            (
                f"{name} was {occupation} born in {city} in {year}.",
                f"Born in {city} in {year}, {name} worked as {occupation}.",
                f"{name}, {occupation}, was born in {year} in {city}.",
            )
        ),
        rng.choice(PERSON_FILLERS),
    ]
    company, spouse, book = person.company.name, person.spouse, person.book
    second = [
        rng.choice(
            (
                f"Later {within} founded {company}.",
                f"{subject} went on to found {company}.",
                f"After ten years {within} started {company}.",
            )
        ),
        rng.choice((f"{subject} married {spouse}.", f"{possessive} partner in life was {spouse}.")),
        rng.choice((f"{possessive} only book is about {book}.", f"{subject} wrote a book about {book}.")),
        rng.choice(PERSON_FILLERS),
    ]
    rng.shuffle(second)
    return [" ".join(first), " ".join(second)]


def _one_or_two_passages(rng: Random, first: list[str], second: list[str]) -> list[str]:
    return [" ".join(first), " ".join(second)] if rng.random() < 0.5 else [" ".join(first + second)]


def _company_page(rng: Random, company: Company) -> list[str]:
    first = [
        rng.choice(
            (
                f"{company.name} is a maker of {company.product} that was set up in {company.year}.",
                f"Set up in {company.year}, {company.name} makes {company.product}.",
            )
        ),
        rng.choice(COMPANY_FILLERS),
    ]
    city, director, staff = company.head_office.name, company.director, company.staff
    second = [
        rng.choice((f"The firm has its head office in {city}.", f"Its head office is in {city}.")),
        rng.choice((f"The firm is run by {director}.", f"Its director is {director}.")),
        rng.choice((f"It employs {staff} people.", f"The firm has {staff} workers.")),
        rng.choice(COMPANY_FILLERS),
    ]
    return _one_or_two_passages(rng, first, second)


def _city_page(rng: Random, city: City) -> list[str]:
    first = [
        rng.choice((f"{city.name} is a city in {city.country}.", f"The city of {city.name} lies in {city.country}.")),
        rng.choice(CITY_FILLERS),
    ]
    second = [
        rng.choice((f"The river {city.river} flows through it.", f"It stands on the river {city.river}.")),
        rng.choice((f"Its mayor is {city.mayor}.", f"The town hall is led by {city.mayor}.")),
        rng.choice(
            (f"Every year it holds the {city.festival} festival.", f"It is known for the {city.festival} festival.")
        ),
        rng.choice(CITY_FILLERS),
    ]
    return _one_or_two_passages(rng, first, second)


def write_pages(rng: Random, world: World) -> list[tuple[str, list[str]]]:
    """Return [(name of the subject, passages)] in random order; the passages of a page stay together."""
    pages = [(p.name, _person_page(rng, p)) for p in world.people]
    pages += [(c.name, _company_page(rng, c)) for c in world.companies]
    pages += [(c.name, _city_page(rng, c)) for c in world.cities]
    rng.shuffle(pages)
    return pages


def questions_about(world: World) -> list[Question]:
    """Return every question that the world answers, with the facts that each one needs."""
    questions: list[Question] = []
    for person in world.people:
        questions += _questions_about_person(person)
    founders = {person.company.name: person for person in world.people}
    for company in world.companies:
        questions += _questions_about_company(company, founders[company.name])
    for city in world.cities:
        questions += _questions_about_city(city)
    return questions


def _questions_about_person(person: Person) -> list[Question]:
    name, city, company = person.name, person.birthplace, person.company
    first, later = StatedFact(name, False), StatedFact(name, True)
    city_first, city_later = StatedFact(city.name, False), StatedFact(city.name, True)
    company_first, company_later = StatedFact(company.name, False), StatedFact(company.name, True)
    return [
        Question("1hop", f"Where was {name} born?", city.name, (first,)),
        Question("1hop", f"In what year was {name} born?", str(person.year), (first,)),
        Question("1hop", f"What was the profession of {name}?", person.occupation, (first,)),
        Question("cross", f"Which company did {name} found?", company.name, (later,)),
        Question("cross", f"Whom did {name} marry?", person.spouse, (later,)),
        Question("cross", f"What is the book by {name} about?", person.book, (later,)),
        Question("2hop", f"In which country was {name} born?", city.country, (first, city_first)),
        Question("2hop", f"Which river flows through the birthplace of {name}?", city.river, (first, city_later)),
        Question("2hop", f"Who is the mayor of the city where {name} was born?", city.mayor, (first, city_later)),
        Question("2hop", f"What does the company founded by {name} make?", company.product, (later, company_first)),
        Question(
            "2hop",
            f"Where is the head office of the company founded by {name}?",
            company.head_office.name,
            (later, company_later),
        ),
        Question("2hop", f"Who runs the company founded by {name}?", company.director, (later, company_later)),
    ]


def _questions_about_company(company: Company, founder: Person) -> list[Question]:
    name, city = company.name, company.head_office
    first, later, by_founder = StatedFact(name, False), StatedFact(name, True), StatedFact(founder.name, True)
    return [
        Question("1hop", f"What does {name} make?", company.product, (first,)),
        Question("1hop", f"When was {name} set up?", str(company.year), (first,)),
        Question("cross", f"Where is the head office of {name}?", city.name, (later,)),
        Question("cross", f"Who runs {name}?", company.director, (later,)),
        Question("cross", f"How many people work for {name}?", str(company.staff), (later,)),
        Question("2hop", f"Who founded {name}?", founder.name, (by_founder,)),
        Question(
            "2hop",
            f"In which country is the head office of {name}?",
            city.country,
            (later, StatedFact(city.name, False)),
        ),
        Question("2hop", f"What was the profession of the founder of {name}?", founder.occupation, (by_founder,)),
        Question("2hop", f"Whom did the founder of {name} marry?", founder.spouse, (by_founder,)),
    ]


def _questions_about_city(city: City) -> list[Question]:
    first, later = StatedFact(city.name, False), StatedFact(city.name, True)
    return [
        Question("1hop", f"In which country is {city.name}?", city.country, (first,)),
        Question("cross", f"Which river flows through {city.name}?", city.river, (later,)),
        Question("cross", f"Who is the mayor of {city.name}?", city.mayor, (later,)),
        Question("cross", f"Which festival is held in {city.name}?", city.festival, (later,)),
    ]


def question_episode(rng: Random, families: int | None = None, titles: bool | None = None) -> Episode:
    """Return one world's pages and questions; a family has about 5 passages and 210 tokens of the demo model.

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
