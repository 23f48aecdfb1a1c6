"""Types that options may have but engine arguments do not use yet."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from vllm_blend.checks import a_type, fits


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, Literal[0, 1], True),
        (True, Literal[0, 1], False),
        (1.0, Literal[0, 1], False),
        ({"a": "1"}, dict[str, int], False),
        ({"a": 1}, dict[str, int], True),
        ([[1], [2]], list[list[int]], True),
        ([[1], 2], list[list[int]], False),
    ],
)
def test_fits(value: Any, hint: Any, expected: bool) -> None:
    assert fits(value, hint) is expected


@pytest.mark.parametrize(
    ("value", "named"), [(3, "an int"), ({}, "a dict"), (OSError(), "an OSError"), (None, "a NoneType")]
)
def test_types_have_their_article(value: Any, named: str) -> None:
    assert a_type(value) == named
