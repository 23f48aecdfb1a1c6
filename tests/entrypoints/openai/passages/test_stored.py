"""The table of stored passages: by tenant, for a time, within bounds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.entrypoints.openai.passages.prompts import PASSAGES, chunk_texts, completion, stuffed
from vllm_blend.entrypoints.openai.passages import PassageFinder
from vllm_blend.entrypoints.openai.passages.stored import (
    StoredPassage,
    StoredPassages,
    TooManyPassagesError,
    UnknownPassageError,
    passage_id,
)

SALTS, TEXTS = st.sampled_from(["a", "b", None]), st.sampled_from(PASSAGES)


def passage(text: str | None, salt: str | None, expires: float = 100.0, **fields: Any) -> StoredPassage:
    return StoredPassage(passage_id(salt, text), salt, text, None, 3, ("key",), 0.0, expires, **fields)


class Table(RuleBasedStateMachine):
    """The table against a dict: (tenant, text) -> when it expires."""

    @initialize()
    def start(self) -> None:
        self.now, self.number = 0.0, 0
        self.finder = PassageFinder(min_characters=1000)  # nothing but stored passages is known
        self.table = StoredPassages(self.finder, max_passages=3, max_characters=300, now=lambda: self.now)
        self.expected: dict[tuple[str | None, str], float] = {}

    @rule(text=TEXTS, salt=SALTS, seconds=st.integers(1, 9))
    def add(self, text: str, salt: str | None, seconds: int) -> None:
        used = sum(len(each) for _, each in self.expected)
        full = sum(owner == salt for owner, _ in self.expected) >= 3 or used + len(text) > 300
        if full and (salt, text) not in self.expected:
            with pytest.raises(TooManyPassagesError, match="delete some, or let them expire"):
                self.table.add(passage(text, salt, self.now + seconds))
            return
        self.expected.pop((salt, text), None)
        self.table.add(passage(text, salt, self.now + seconds))
        self.expected[salt, text] = self.now + seconds

    @rule(text=TEXTS, salt=SALTS, seconds=st.integers(1, 9))
    def keep(self, text: str, salt: str | None, seconds: int) -> None:
        if (salt, text) in self.expected:
            self.table.keep(self.table.get(passage_id(salt, text), salt), seconds, 7)
            self.expected[salt, text] = self.now + seconds

    @rule(text=TEXTS, salt=SALTS)
    def delete(self, text: str, salt: str | None) -> None:
        if (salt, text) in self.expected:
            self.table.delete(passage_id(salt, text), salt)
            del self.expected[salt, text]
        else:
            with pytest.raises(UnknownPassageError):
                self.table.delete(passage_id(salt, text), salt)

    @rule(seconds=st.integers(1, 6))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.expected = {key: expires for key, expires in self.expected.items() if expires > self.now}

    @invariant()
    def is_as_expected(self) -> None:
        if not hasattr(self, "table"):
            return
        for salt in ("a", "b", None):
            listed, has_more = self.table.page(salt, 10)
            assert [each.text for each in listed] == [text for owner, text in self.expected if owner == salt]
            assert not has_more and all(each.salt == salt for each in listed)
            self.number += 1  # no two prompts begin alike, so that nothing is left to the prefix cache
            prompt = completion(
                self.finder, stuffed(*PASSAGES, question="Who?", instruction=f"Read {self.number}"), salt
            )
            own = [text for text in PASSAGES if (salt, text) in self.expected]
            assert [text.strip() for text in chunk_texts(prompt)] == own
        assert len(self.table) == len(self.expected)
        assert len(self.table._expiries) < 100 and (self.expected or not self.finder._registered)


Table.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestTable = Table.TestCase


def test_another_tenants_ids_are_unknown() -> None:
    table = StoredPassages(PassageFinder(), now=lambda: 0.0)
    own = table.add(passage(PASSAGES[0], "tenant-a"))
    assert own.id != passage_id("tenant-b", PASSAGES[0]) and "tenant-a" not in repr(own)
    for salt in ("tenant-b", None):
        for use in (table.get, table.text_of, table.delete):
            with pytest.raises(UnknownPassageError, match="never stored with this API key"):
                use(own.id, salt)
        with pytest.raises(UnknownPassageError):
            table.page(salt, 10, after=own.id)
        assert table.page(salt, 10) == ([], False)
    assert table.text_of(own.id, "tenant-a") is own


def test_pages_of_the_list() -> None:
    table = StoredPassages(PassageFinder(), now=lambda: 0.0)
    ids = [table.add(passage(text, None)).id for text in PASSAGES]
    first, more = table.page(None, 2)
    rest, none = table.page(None, 2, after=first[-1].id)
    assert [each.id for each in [*first, *rest]] == ids and more and not none


def test_token_ids_have_no_text_to_name() -> None:
    table = StoredPassages(PassageFinder(), now=lambda: 0.0)
    with pytest.raises(ValueError, match="was stored as token ids"):
        table.text_of(table.add(passage(None, None)).id, None)
