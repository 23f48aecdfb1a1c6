"""The pages of a plain world. As in `world_facts`, the order of the draws is part of the distribution."""

from __future__ import annotations

from random import Random

from vllm_blend.quality.world_facts import City, Company, Person, World

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


def article(noun: str) -> str:
    """Return the noun after "a" or "an"."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _person_page(rng: Random, person: Person) -> list[str]:
    """Write two passages. The second calls the person by a pronoun or by surname, and its sentences are shuffled."""
    name, year, city = person.name, person.year, person.birthplace.name
    subject = rng.choice(("She" if person.female else "He", person.surname, person.surname))
    within = subject if subject == person.surname else subject.lower()
    possessive = "Her" if person.female else "His"
    occupation = article(person.occupation)
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
