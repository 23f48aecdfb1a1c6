"""Items of flows that take turns: a property over all that may happen to them."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_blend.core.turns import Flow, TurnQueue

pytestmark = pytest.mark.cpu_only

FLOWS: list[Flow] = [("a", "1"), ("a", "2"), ("a", "3"), ("b", "1"), ("c",)]
EVENTS = st.lists(st.tuples(st.sampled_from(["add", "turn", "drop"]), st.sampled_from(FLOWS)), max_size=60)


@given(events=EVENTS, without=st.sets(st.sampled_from(FLOWS)))
def test_the_flow_whose_last_turn_was_longest_ago_is_next(events: list[tuple[str, Flow]], without: set[Flow]) -> None:
    """Reference: every flow with its items, and the numbers of the last turns; a call without items is forgotten."""
    queue: TurnQueue[int] = TurnQueue()
    waiting: dict[Flow, deque[int]] = {}
    last: dict[Flow, int] = {}

    def expected(excluded: set[Flow]) -> set[Flow]:
        """Return the flows that may be next: of those that never had a turn, any that came may be."""
        found = {flow: [last.get(flow[:stop], 0) for stop in (1, 2)] for flow in waiting if flow not in excluded}
        least = min(found.values(), default=None)
        return {flow for flow, turns in found.items() if turns == least}

    for number, (event, flow) in enumerate(events, start=1):
        if event == "add":
            queue.add(flow, number)
            waiting.setdefault(flow, deque()).append(number)
        elif event == "drop":
            queue.drop(lambda item: item % 2 == 0)
            waiting = {each: deque(item for item in items if item % 2) for each, items in waiting.items()}
        elif (chosen := queue.next()) is not None:
            assert chosen in expected(set())
            assert queue.first(chosen) == waiting[chosen][0] == queue.take(chosen)
            waiting[chosen].popleft()
            queue.mark(chosen)
            last[chosen[:1]] = number
            last[chosen] = number
        waiting = {each: items for each, items in waiting.items() if items}
        last = {each: turn for each, turn in last.items() if len(each) == 1 or each in waiting}
        assert [queue.count(each) for each in FLOWS] == [len(waiting.get(each, ())) for each in FLOWS]
    found = queue.next(without)
    assert (found is None and not expected(without)) or found in expected(without)
