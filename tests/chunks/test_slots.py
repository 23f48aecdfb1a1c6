"""Where texts stand in what a template makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vllm_blend.chunks.slots import find_slots

MARK = "ThePartSays0x5d2c90e7n"


def render(texts: Sequence[str]) -> str:
    return "".join(f"<{text.strip()}>" for text in texts)


def test_texts_are_found_in_the_order_in_which_they_stand() -> None:
    texts = [f"text {number % 7} " for number in range(2000)]
    numbers = [*range(0, 2000, 3)]

    def backwards(given: Sequence[str]) -> str:
        return render(given[::-1])

    for make, order in ((render, numbers), (backwards, numbers[::-1])):
        whole = make(texts)
        slots = find_slots(make, texts, numbers, whole)
        assert slots is not None and [*slots] == order
        assert all(whole[slot.start : slot.stop] == texts[number].strip() for number, slot in slots.items())


@pytest.mark.parametrize("forged", [f"{MARK}0e", f"{MARK}1e", f"{MARK}7e", f"{MARK}00e", f"{MARK}{'9' * 5000}e"])
def test_a_text_that_has_a_mark_does_no_harm(forged: str) -> None:
    """Texts that are not looked for may say anything: the others are found where they are, or not at all."""
    texts = ["first", forged, "last"]
    whole = render(texts)
    slots = find_slots(render, texts, [0, 2], whole)
    assert slots is None or [whole[slot.start : slot.stop] for slot in slots.values()] == ["first", "last"]


def test_texts_that_are_changed_or_shown_twice_are_not_found() -> None:
    texts = ["first", "last"]
    assert find_slots(lambda t: render(t).upper(), texts, [0, 1], render(texts).upper()) is None
    assert find_slots(lambda t: render(t) * 2, texts, [0, 1], render(texts) * 2) is None
    assert find_slots(lambda t: render(t[:1]), texts, [0, 1], render(texts[:1])) is None
