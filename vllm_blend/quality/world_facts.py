"""The facts of a synthetic world: made-up people, the companies they founded and the cities they were born in.

Every function draws from the `random.Random` it is given, in a fixed order: another order would give other worlds and
other `inputs/*.json`. `splits` says which seeds are for what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


def _words(text: str) -> list[str]:
    return text.split()


ONSETS = _words("b br c ch d dr f fl g gr h j k kl l m n p pr r s sh st t tr v w y z")
VOWELS = _words("a e i o u ai ea ia io ou")
CODAS = ["", "", "n", "r", "l", "s", "m", "nd", "x", "ss"]
OCCUPATIONS = _words(
    "chemist painter engineer botanist architect composer surgeon sailor historian astronomer printer geologist weaver "
    "actor lawyer"
)
PRODUCTS = _words(
    "clocks engines carpets lenses bicycles paper glass radios boats pianos shoes cameras tractors tiles lamps"
)
COMPANY_SUFFIXES = (" Works", " Company", " Brothers", " Union")
BOOK_SUBJECTS = [
    "the history of salt",
    "the habits of owls",
    "the great flood",
    "the art of bread",
    "the southern stars",
    "a journey by canal",
    "the grammar of birds",
    "the lost railway",
    "the price of iron",
    "the garden at night",
]


@dataclass(frozen=True)
class City:
    name: str
    country: str
    river: str
    mayor: str
    festival: str


@dataclass(frozen=True)
class Company:
    name: str
    product: str
    head_office: City
    year: int
    director: str
    staff: int

    @property
    def short_name(self) -> str:
        return self.name.split()[0]


@dataclass(frozen=True)
class Person:
    """A person and the company that the person founded."""

    first_name: str
    surname: str
    female: bool
    occupation: str
    birthplace: City
    year: int
    book: str
    spouse: str
    company: Company

    @property
    def name(self) -> str:
        return f"{self.first_name} {self.surname}"


@dataclass(frozen=True)
class World:
    """People in order of creation, companies shuffled (person i founded companies[i]), cities in order of creation."""

    people: tuple[Person, ...]
    companies: tuple[Company, ...]
    cities: tuple[City, ...]


class _Names:
    """Makes up names that no other entity of the same world has."""

    def __init__(self, rng: Random) -> None:
        self.rng, self.used = rng, set[str]()

    def word(self, suffix: str = "") -> str:
        return self.unused(lambda: made_up_name(self.rng) + suffix)

    def full_name(self) -> str:
        return self.unused(lambda: f"{made_up_name(self.rng)} {made_up_name(self.rng)}")

    def company(self) -> str:
        return self.word() + self.rng.choice(COMPANY_SUFFIXES)

    def unused(self, draw: Callable[[], str]) -> str:
        while (candidate := draw()) in self.used:
            pass
        self.used.add(candidate)
        return candidate


def made_up_name(rng: Random) -> str:
    """Return two random syllables, capitalised."""
    syllables = (rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS) for _ in range(2))
    return "".join(syllables).capitalize()


def make_world(rng: Random, families: int) -> World:
    """Return `families` people, and as many companies and cities. In 60% of the larger worlds two people share a
    surname. Raises ValueError for fewer than one family."""
    if families < 1:
        raise ValueError(f"a world of {families} families has no facts: use 1 or more (8 have about 40 passages)")
    names = _Names(rng)
    cities = [
        City(
            name=names.word(),
            country=names.word("ia"),
            river=names.word(),
            mayor=names.full_name(),
            festival=names.word(),
        )
        for _ in range(families)
    ]
    surnames = [names.word() for _ in range(families)]
    if families >= 2 and rng.random() < 0.6:
        surnames[1] = surnames[0]
    drafts: list[dict[str, Any]] = [
        {
            "first_name": names.word(),
            "surname": surname,
            "female": rng.random() < 0.5,
            "occupation": rng.choice(OCCUPATIONS),
            "birthplace": rng.choice(cities),
            "year": rng.randint(1801, 1989),
            "book": rng.choice(BOOK_SUBJECTS),
            "spouse": names.full_name(),
        }
        for surname in surnames
    ]
    companies = [
        Company(
            name=names.company(),
            product=rng.choice(PRODUCTS),
            head_office=rng.choice(cities),
            year=rng.randint(1801, 1989),
            director=names.full_name(),
            staff=rng.randint(11, 99) * 10,
        )
        for _ in range(families)
    ]
    rng.shuffle(companies)
    people = [Person(**draft, company=company) for draft, company in zip(drafts, companies, strict=True)]
    return World(tuple(people), tuple(companies), tuple(cities))
