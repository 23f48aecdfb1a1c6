"""Registries, from which users choose by name."""

from __future__ import annotations

import pytest

from vllm_blend.registry import Registry


class Apple:
    name = "apple"


class Pear:
    name = "pear"


def fruits() -> Registry[type]:
    return Registry("fruit", "favourite", (Pear, Apple), aliases={"auto": "pear"})


def test_entries_are_found_by_name() -> None:
    assert fruits().find("apple") is Apple
    assert fruits().names() == ["auto", "apple", "pear"]
    assert [*fruits()] == ["pear", "apple"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("aple", r"favourite='aple' is unknown: use one of \['auto', 'apple', 'pear'\], .*; did you mean 'apple'\?$"),
        ("plum", "favourite='plum' is unknown: .*, or register your own$"),
        (["apple"], r"favourite=\['apple'\] is unknown: use one of"),
        ("auto", "favourite='auto' is unknown"),
    ],
)
def test_an_unknown_name_says_what_there_is(name: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fruits().find(name)


def test_a_class_registers_itself_once() -> None:
    registry = fruits()

    @registry.register
    class Plum:
        name = "plum"

    assert registry.register(Plum) is Plum is registry.find("plum")
    for name, message in [
        ("apple", r"a fruit named 'apple' is registered already \(Apple\)"),
        ("auto", "Other cannot be named 'auto': that stands for 'pear'"),
        ("", "Other needs a class attribute `name`"),
    ]:
        with pytest.raises(ValueError, match=message):
            registry.register(type("Other", (), {"name": name}))
