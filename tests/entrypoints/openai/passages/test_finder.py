"""What is remembered of whose passages, and how much."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_blend.entrypoints.openai.passages.finder import FoundPassages, PassageFinder, TextSection
from vllm_blend.entrypoints.openai.passages.text_pieces import split_text

WORDS = ["alpha beta", "gamma delta", "epsilon zeta", "eta theta", "iota kappa"]
SALTS = st.sampled_from(["a", "b", None, "c", "d"])
LONG = [f"{word} is what they say where the {word} stands beside the other {word} of old." for word in WORDS[:3]]
PIECES = st.sampled_from([*WORDS, *LONG, f"[7] {LONG[0]}", f"So {LONG[1]} And {LONG[2]}", f"{LONG[1]}\n{LONG[0]}"])
TEXTS = st.lists(PIECES, min_size=1, max_size=5).map("\n\n".join)


def look(finder: PassageFinder, text: str, salt: str | None, names_some: bool = False) -> FoundPassages:
    return finder.find(text, [TextSection(split_text(text), num_kept=1)], salt, names_some)


class Tenants(RuleBasedStateMachine):
    """One finder for all tenants finds what a finder of each tenant's own finds, while nothing is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = PassageFinder(min_characters=4)
        self.own: dict[str | None, PassageFinder] = defaultdict(lambda: PassageFinder(min_characters=4))
        self.small = PassageFinder(min_characters=4, max_passages=2, max_bytes=300, max_prefixes=3)

    @rule(text=TEXTS, salt=SALTS, names_some=st.booleans())
    def find(self, text: str, salt: str | None, names_some: bool) -> None:
        found = look(self.shared, text, salt, names_some)
        assert found == look(self.own[salt], text, salt, names_some)
        assert all(text[start:stop].strip() for start, stop in found.chunks)
        look(self.small, text, salt, names_some)

    @rule(text=TEXTS, salt=SALTS)
    def see(self, text: str, salt: str | None) -> None:
        for finder in (self.shared, self.own[salt], self.small):
            finder.see([text], salt)

    @rule(text=TEXTS, salt=SALTS)
    def register(self, text: str, salt: str | None) -> None:
        for finder in (self.shared, self.own[salt]):
            finder.register(text, salt)

    @rule(text=TEXTS, salt=SALTS)
    def forget(self, text: str, salt: str | None) -> None:
        for finder in (self.shared, self.own[salt]):
            finder.forget(text, salt)

    @invariant()
    def is_bounded(self) -> None:
        assert len(self.shared) == sum(map(len, self.own.values()))
        assert len(self.small) <= self.small.max_total
        assert len(self.small._tenants) <= 2
        assert len(self.small) == sum(tenant.size for tenant in self.small._tenants.values())
        assert all(len(t.seen) <= 2 and len(t.prefixes) <= 3 for t in self.small._tenants.values())
        assert all(len(t.young.names) <= 1 and len(t.old.data) < 2000 for t in self.small._tenants.values())


Tenants.TestCase.settings = settings(max_examples=60, stateful_step_count=25)
TestTenants = Tenants.TestCase


def test_another_tenants_passages_are_unknown() -> None:
    """Whatever tenant A has sent, named or registered, tenant B gets what it would get from a new server."""
    finder, texts = PassageFinder(min_characters=4), ["\n\n".join([*WORDS, "?"]), "\n\n".join([*WORDS[::-1], "?"])]
    finder.register(WORDS[0], "tenant-a")
    finder.see(WORDS, "tenant-a")
    for text in [*texts, *texts]:
        look(finder, text, "tenant-a")
    for salt in ("tenant-b", None):
        fresh = PassageFinder(min_characters=4)
        for text in texts:
            assert look(finder, text, salt) == look(fresh, text, salt)
    assert look(finder, texts[1] + "?", "tenant-a").chunks


def test_registered_passages_of_several_paragraphs() -> None:
    """They are found the first time, whole, and not where they go on into the question."""
    finder = PassageFinder()
    passage = "\n\n".join(WORDS[:3])
    finder.register(passage, None)
    finder.register(WORDS[0], None)
    text = "\n\n".join(["Some context:", WORDS[0], passage, WORDS[1], "Which?"])
    assert [text[a:b].strip() for a, b in look(finder, text, None).chunks] == [WORDS[0], passage]
    element = f"Read <document>{passage}</document><source>{passage}\n\nmore</source> Which?"
    assert [element[a:b].strip() for a, b in look(finder, element, None).chunks] == [passage, passage]
    question = "\n\n".join(["Some context:", passage])
    assert [question[a:b].strip() for a, b in look(finder, question, None).chunks] == [WORDS[0]]
    for each in (passage, WORDS[0], WORDS[0]):
        finder.forget(each, None)
    assert look(finder, text + "!", None).chunks == ()


def test_a_prompt_of_very_many_pieces_is_not_looked_at() -> None:
    finder = PassageFinder(min_characters=1)
    for _ in range(2):
        assert look(finder, "a\n\n" * 9000 + "?", None) == FoundPassages() and len(finder) == 0


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="max_passages=0 must be at least 1"):
        PassageFinder(max_passages=0)


@pytest.mark.parametrize("num_fixed", [0, 1], ids=["user", "system"])
@pytest.mark.parametrize("instruction", ["Use the context.\n", "Use the context.\nBe brief.\n--------\n"])
@pytest.mark.parametrize("lines", [1, 3])
def test_an_instruction_ends_without_a_blank_line(num_fixed: int, instruction: str, lines: int) -> None:
    """LangChain's stock prompt has none. All passages are found behind the instruction, whichever comes first."""
    finder = PassageFinder(min_characters=4)
    passages = ["\n".join(f"{name} says {line}" for line in range(lines)) for name in ("one", "two", "three", "four")]
    for turn, numbers in enumerate(["0123", "1032", "2301", "3210", "3021", "3102"]):
        order = [passages[int(number)] for number in numbers]
        text = instruction + "\n\n".join([*order, "Who?"])
        section = TextSection(split_text(text), num_kept=1, num_fixed=num_fixed)
        found = finder.find(text, [section], None, False)
        if turn >= 3:
            assert [text[start:stop].strip() for start, stop in found.chunks] == order
            assert found.fixed == len(instruction)
    new = instruction + "\n\n".join(["five is new here", *passages, "Who?"])
    found = finder.find(new, [TextSection(split_text(new), num_kept=1, num_fixed=num_fixed)], None, False)
    assert found.fixed == len(instruction) and len(found.chunks) == 4
