"""The pages of a wild world: later passages call their subject by what it is, and notices only mention subjects.

A notice is a page of one passage that has names of the world and words of questions in it, and answers none: a search
for words finds it, too.
"""

from __future__ import annotations

from random import Random

from vllm_blend.quality.world_facts import City, Company, Person, World, made_up_name
from vllm_blend.quality.world_pages import CITY_FILLERS, COMPANY_FILLERS, PERSON_FILLERS, article

TWO_PASSAGES = {Person: 0.6, Company: 0.25, City: 0.25}
NOTICES = 0.9
NOTICE_FILLERS = [
    "It is open on Sundays and closed in the winter.",
    "Children and soldiers do not have to pay.",
    "The catalogue was printed long ago and is hard to find.",
    "A lift goes to the upper floor.",
    "Part of the collection was sold after the war.",
]
HOLDERS = ("Archive", "Museum", "Library", "Society")
PERSON_ASKED = ("where they were born", "what they did for a living", "whom they married", "what they wrote about")
COMPANY_ASKED = ("when they were set up", "where the head office is", "who runs them", "what they make")
CITY_ASKED = ("in which country they are", "which river flows through them", "who is the mayor", "what they celebrate")


def write_wild_pages(rng: Random, world: World) -> list[tuple[str, list[str]]]:
    """Return [(name of the subject, passages)] in random order; the passages of a page stay together."""
    pages = [(person.name, _person_page(rng, person)) for person in world.people]
    pages += [(company.name, _company_page(rng, company)) for company in world.companies]
    pages += [(city.name, _city_page(rng, city)) for city in world.cities]
    pages += [_notice(rng, world) for _ in world.people if rng.random() < NOTICES]
    rng.shuffle(pages)
    return pages


def _split(rng: Random, kind: type, first: list[str], later: list[str]) -> list[str]:
    if rng.random() < TWO_PASSAGES[kind]:
        return [" ".join(first), " ".join(later)]
    return [" ".join(first + later)]


def _person_page(rng: Random, person: Person) -> list[str]:
    name, year, city, occupation = person.name, person.year, person.birthplace.name, article(person.occupation)
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
    pronoun = "she" if person.female else "he"
    alias = rng.choice((pronoun, person.surname, f"the {person.occupation}"))
    subject = alias[0].upper() + alias[1:]
    later = [
        rng.choice((f"Later {alias} founded {person.company.name}.", f"{subject} then started {person.company.name}.")),
        rng.choice((f"{subject} married {person.spouse}.", f"{person.spouse} and {alias} were married.")),
        rng.choice((f"The only book of those years is about {person.book}.", f"{subject} wrote about {person.book}.")),
        rng.choice(PERSON_FILLERS),
    ]
    rng.shuffle(later)
    return _split(rng, Person, first, later)


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
    alias = rng.choice(("it", "the firm", "the house", company.short_name))
    subject = alias[0].upper() + alias[1:]
    later = [
        rng.choice(
            (
                f"{subject} has its head office in {company.head_office.name}.",
                f"The head office is in {company.head_office.name}.",
            )
        ),
        rng.choice((f"{subject} is run by {company.director}.", f"The director is {company.director}.")),
        rng.choice((f"{subject} employs {company.staff} people.", f"There are {company.staff} workers.")),
    ]
    rng.shuffle(later)
    return _split(rng, Company, first, later)


def _city_page(rng: Random, city: City) -> list[str]:
    first = [
        rng.choice((f"{city.name} is a city in {city.country}.", f"The city of {city.name} lies in {city.country}.")),
        rng.choice(CITY_FILLERS),
    ]
    alias = rng.choice(("it", "the city", "the place"))
    subject = alias[0].upper() + alias[1:]
    later = [
        rng.choice((f"The river {city.river} flows through {alias}.", f"{subject} stands on the river {city.river}.")),
        rng.choice((f"{city.mayor} is the mayor.", f"The town hall is led by {city.mayor}.")),
        rng.choice(
            (
                f"Every year {alias} holds the {city.festival} festival.",
                f"The {city.festival} festival is held every year.",
            )
        ),
    ]
    rng.shuffle(later)
    return _split(rng, City, first, later)


def _notice(rng: Random, world: World) -> tuple[str, list[str]]:
    """Return a page that mentions subjects of one kind, and asks about them what it does not answer."""
    holder = f"The {made_up_name(rng)} {rng.choice(HOLDERS)}"
    names, asked = rng.choice(
        (
            ([person.surname for person in world.people], PERSON_ASKED),
            ([company.short_name for company in world.companies], COMPANY_ASKED),
            ([city.name for city in world.cities], CITY_ASKED),
        )
    )
    different = list(dict.fromkeys(names))
    mentioned = " and ".join(rng.sample(different, min(2, len(different))))
    sentences = [
        f"{holder} has rooms that are called after {mentioned}.",
        rng.choice(NOTICE_FILLERS),
        f"Visitors often ask {rng.choice(asked)}.",
    ]
    return holder, [" ".join(sentences)]
