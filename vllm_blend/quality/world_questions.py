"""What can be asked about a world. The order of the questions is part of the distribution, as in `world_facts`."""

from __future__ import annotations

from vllm_blend.quality.episodes import Question, StatedFact
from vllm_blend.quality.world_facts import City, Company, Person, World


def questions_about(world: World) -> list[Question]:
    """Return every question that the world answers, with the facts that each one needs."""
    founders = {person.company.name: person for person in world.people}
    return [
        *(question for person in world.people for question in _about_person(person)),
        *(question for company in world.companies for question in _about_company(company, founders[company.name])),
        *(question for city in world.cities for question in _about_city(city)),
    ]


def _about_person(person: Person) -> list[Question]:
    name, city, company = person.name, person.birthplace, person.company
    first, later = _facts(name)
    city_first, city_later = _facts(city.name)
    company_first, company_later = _facts(company.name)
    in_city, in_company = (first, city_later), (later, company_later)
    return [
        Question("1hop", f"Where was {name} born?", city.name, (first,)),
        Question("1hop", f"In what year was {name} born?", str(person.year), (first,)),
        Question("1hop", f"What was the profession of {name}?", person.occupation, (first,)),
        Question("cross", f"Which company did {name} found?", company.name, (later,)),
        Question("cross", f"Whom did {name} marry?", person.spouse, (later,)),
        Question("cross", f"What is the book by {name} about?", person.book, (later,)),
        Question("2hop", f"In which country was {name} born?", city.country, (first, city_first)),
        Question("2hop", f"Which river flows through the birthplace of {name}?", city.river, in_city),
        Question("2hop", f"Who is the mayor of the city where {name} was born?", city.mayor, in_city),
        Question("2hop", f"What does the company founded by {name} make?", company.product, (later, company_first)),
        Question(
            "2hop", f"Where is the head office of the company founded by {name}?", company.head_office.name, in_company
        ),
        Question("2hop", f"Who runs the company founded by {name}?", company.director, in_company),
    ]


def _about_company(company: Company, founder: Person) -> list[Question]:
    name, city = company.name, company.head_office
    first, later = _facts(name)
    by_founder = _facts(founder.name)[1]
    abroad = (later, _facts(city.name)[0])
    return [
        Question("1hop", f"What does {name} make?", company.product, (first,)),
        Question("1hop", f"When was {name} set up?", str(company.year), (first,)),
        Question("cross", f"Where is the head office of {name}?", city.name, (later,)),
        Question("cross", f"Who runs {name}?", company.director, (later,)),
        Question("cross", f"How many people work for {name}?", str(company.staff), (later,)),
        Question("2hop", f"Who founded {name}?", founder.name, (by_founder,)),
        Question("2hop", f"In which country is the head office of {name}?", city.country, abroad),
        Question("2hop", f"What was the profession of the founder of {name}?", founder.occupation, (by_founder,)),
        Question("2hop", f"Whom did the founder of {name} marry?", founder.spouse, (by_founder,)),
    ]


def _about_city(city: City) -> list[Question]:
    first, later = _facts(city.name)
    return [
        Question("1hop", f"In which country is {city.name}?", city.country, (first,)),
        Question("cross", f"Which river flows through {city.name}?", city.river, (later,)),
        Question("cross", f"Who is the mayor of {city.name}?", city.mayor, (later,)),
        Question("cross", f"Which festival is held in {city.name}?", city.festival, (later,)),
    ]


def _facts(page: str) -> tuple[StatedFact, StatedFact]:
    """Return a fact of the page's first passage, and one of a later passage."""
    return StatedFact(page, False), StatedFact(page, True)
