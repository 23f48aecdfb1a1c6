"""Options as they are declared: groups, their checks, and the page that is made from them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from vllm_blend.checks import at_least, describe, not_empty
from vllm_blend.options import OptionGroup, option
from vllm_blend.options_page import options_page

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Inner(OptionGroup):
    title: ClassVar[str] = "Inner"
    prefix: ClassVar[str] = "inner_"

    size: int = option(3, "how large", check=at_least(2))
    where: str | None = option(None, "where it lies", name="place", check=not_empty("leave it out"))


@dataclass(frozen=True)
class Outer(OptionGroup):
    title: ClassVar[str] = "Outer"

    name: str = option(help="what it is called")
    inner: Inner = Inner()
    numbers: list[int] = option([1, 2], "some numbers")
    note: str = ""  # not an option


def test_a_group_lists_its_options_under_the_names_that_users_give() -> None:
    assert [group.title for group in Outer.groups()] == ["Outer", "Inner"]
    name, numbers = Outer.options()
    assert (name.name, name.is_required, numbers.default, numbers.help) == ("name", True, [1, 2], "some numbers")
    assert [(each.name, each.type, each.default) for each in Inner.options()] == [
        ("inner_size", int, 3),
        ("place", str | None, None),
    ]


def test_values_by_name_make_a_group_and_those_in_it() -> None:
    values = {"name": "a", "numbers": [4], "inner_size": 5, "place": "b", "more": "ignored"}
    assert Outer.from_values(values, note="n") == Outer("a", Inner(5, "b"), [4], "n")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": "3"}, "^Inner.size='3' must be a whole number, not str$"),
        ({"size": 1}, "^inner_size=1 must be a whole number of at least 2$"),
        ({"where": ""}, "^place is empty: leave it out$"),
    ],
)
def test_a_value_is_checked_by_its_type_and_by_its_own_check(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Inner(**values)


def test_a_list_as_default_belongs_to_one_group() -> None:
    first = Outer("a")
    first.numbers.append(3)
    assert Outer("a").numbers == [1, 2] and Outer.options()[1].default == [1, 2]


def test_the_page_of_options_is_that_of_the_declarations() -> None:
    assert (ROOT / "docs/options.md").read_text(encoding="utf-8") == options_page(), (
        "run python -m vllm_blend.options_page > docs/options.md"
    )


@pytest.mark.parametrize(
    ("hint", "text"),
    [
        (list[int] | None, "a list of whole numbers or None"),
        (dict[str, Any] | Inner | None, "a dict with strings as keys, a Inner or None"),
        (str | torch.dtype, "a string or a torch.dtype"),
    ],
)
def test_types_are_described_in_words(hint: Any, text: str) -> None:
    assert describe(hint) == text
