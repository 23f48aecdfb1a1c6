"""What can be asked about a world, and in which words: the first phrase of each topic is that of plain worlds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_blend.quality.episodes import Question, StatedFact
from vllm_blend.quality.world_facts import City, Company, Person, World

PHRASES = {
    "birthplace": (
        "Where was {} born?",
        "In what town did {} come into the world?",
        "What is the native city of {}?",
        "Which place did {} come from?",
    ),
    "birth year": (
        "In what year was {} born?",
        "When did {} come into the world?",
        "In which year did the life of {} begin?",
    ),
    "occupation": (
        "What was the profession of {}?",
        "What did {} do for a living?",
        "By what trade did {} earn money?",
    ),
    "company": (
        "Which company did {} found?",
        "What business goes back to {}?",
        "Which firm was brought to life by {}?",
    ),
    "spouse": (
        "Whom did {} marry?",
        "Who was the husband or wife of {}?",
        "With whom did {} share a household?",
    ),
    "book": (
        "What is the book by {} about?",
        "On what subject did {} publish?",
        "What did {} write about?",
    ),
    "birth country": (
        "In which country was {} born?",
        "In what land did {} come into the world?",
        "To which state does the native city of {} belong?",
    ),
    "birth river": (
        "Which river flows through the birthplace of {}?",
        "What water runs past the native city of {}?",
        "On which river is the town where {} came into the world?",
    ),
    "birth mayor": (
        "Who is the mayor of the city where {} was born?",
        "Who governs the native city of {}?",
        "Who is in charge of the town where {} came into the world?",
    ),
    "company product": (
        "What does the company founded by {} make?",
        "What goods come from the business that goes back to {}?",
        "What can be bought from the firm that {} brought to life?",
    ),
    "company office": (
        "Where is the head office of the company founded by {}?",
        "From which town is the business led that goes back to {}?",
        "In what city is the firm at home that {} brought to life?",
    ),
    "company director": (
        "Who runs the company founded by {}?",
        "Who is the boss of the business that goes back to {}?",
        "Who manages the firm that {} brought to life?",
    ),
    "product": ("What does {} make?", "What goods come from {}?", "What can be bought from {}?"),
    "company year": (
        "When was {} set up?",
        "In which year did {} come into being?",
        "Since when has {} been in business?",
    ),
    "office": ("Where is the head office of {}?", "From which town is {} led?", "In what city is {} at home?"),
    "director": ("Who runs {}?", "Who is the boss of {}?", "Who manages {}?"),
    "staff": ("How many people work for {}?", "What is the size of the staff of {}?", "How many does {} pay wages to?"),
    "founder": ("Who founded {}?", "To whom does {} go back?", "Who brought {} to life?"),
    "office country": (
        "In which country is the head office of {}?",
        "From what land is {} led?",
        "In which state is {} at home?",
    ),
    "founder occupation": (
        "What was the profession of the founder of {}?",
        "What did the person who brought {} to life do for a living?",
        "By what trade did the founder of {} earn money?",
    ),
    "founder spouse": (
        "Whom did the founder of {} marry?",
        "Who was the husband or wife of the person who brought {} to life?",
        "With whom did the founder of {} share a household?",
    ),
    "country": ("In which country is {}?", "In what land can {} be found?", "To which state does {} belong?"),
    "river": ("Which river flows through {}?", "What water runs past {}?", "On which river is {}?"),
    "mayor": ("Who is the mayor of {}?", "Who governs {}?", "Who is in charge of {}?"),
    "festival": (
        "Which festival is held in {}?",
        "What feast do people celebrate in {}?",
        "To what event does {} invite guests every year?",
    ),
}


@dataclass(frozen=True)
class Relation:
    """Something that can be asked about a subject. `topic` is a key of PHRASES; `through` names the topic by which a
    question of two hops leaves the subject's page."""

    topic: str
    kind: str
    answer: str
    evidence: tuple[StatedFact, ...]
    through: str = ""


def relations(world: World) -> Iterator[tuple[Person | Company | City, list[Relation]]]:
    """Yield every subject of a world with all that can be asked about it: people, then companies, then cities."""
    for person in world.people:
        yield person, _about_person(person)
    founders = {person.company.name: person for person in world.people}
    for company in world.companies:
        yield company, _about_company(company, founders[company.name])
    for city in world.cities:
        yield city, _about_city(city)


def questions_about(world: World) -> list[Question]:
    """Return every question that the world answers, with the facts that each one needs, in the words of plain
    worlds."""
    return [
        Question(relation.kind, PHRASES[relation.topic][0].format(subject.name), relation.answer, relation.evidence)
        for subject, found in relations(world)
        for relation in found
    ]


def _about_person(person: Person) -> list[Relation]:
    city, company = person.birthplace, person.company
    first, later = _facts(person.name)
    city_first, city_later = _facts(city.name)
    company_first, company_later = _facts(company.name)
    return [
        Relation("birthplace", "1hop", city.name, (first,)),
        Relation("birth year", "1hop", str(person.year), (first,)),
        Relation("occupation", "1hop", person.occupation, (first,)),
        Relation("company", "cross", company.name, (later,)),
        Relation("spouse", "cross", person.spouse, (later,)),
        Relation("book", "cross", person.book, (later,)),
        Relation("birth country", "2hop", city.country, (first, city_first), "birthplace"),
        Relation("birth river", "2hop", city.river, (first, city_later), "birthplace"),
        Relation("birth mayor", "2hop", city.mayor, (first, city_later), "birthplace"),
        Relation("company product", "2hop", company.product, (later, company_first), "company"),
        Relation("company office", "2hop", company.head_office.name, (later, company_later), "company"),
        Relation("company director", "2hop", company.director, (later, company_later), "company"),
    ]


def _about_company(company: Company, founder: Person) -> list[Relation]:
    city = company.head_office
    first, later = _facts(company.name)
    by_founder = _facts(founder.name)[1]
    return [
        Relation("product", "1hop", company.product, (first,)),
        Relation("company year", "1hop", str(company.year), (first,)),
        Relation("office", "cross", city.name, (later,)),
        Relation("director", "cross", company.director, (later,)),
        Relation("staff", "cross", str(company.staff), (later,)),
        Relation("founder", "2hop", founder.name, (by_founder,)),
        Relation("office country", "2hop", city.country, (later, _facts(city.name)[0]), "office"),
        Relation("founder occupation", "2hop", founder.occupation, (by_founder,), "founder"),
        Relation("founder spouse", "2hop", founder.spouse, (by_founder,), "founder"),
    ]


def _about_city(city: City) -> list[Relation]:
    first, later = _facts(city.name)
    return [
        Relation("country", "1hop", city.country, (first,)),
        Relation("river", "cross", city.river, (later,)),
        Relation("mayor", "cross", city.mayor, (later,)),
        Relation("festival", "cross", city.festival, (later,)),
    ]


def _facts(page: str) -> tuple[StatedFact, StatedFact]:
    """Return a fact of the page's first passage, and one of a later passage."""
    return StatedFact(page, False), StatedFact(page, True)
