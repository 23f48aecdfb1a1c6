"""An engine that attends shared pages once answers as one that does not, and does so where pages are shared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests import settings
from tests.chunks.llms import chunked_llm, random_ids
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import greedy, tiny_model
from vllm_blend import ChunkedLLM, RequestOutput
from vllm_blend.attention.context import ForwardContext, forward_context
from vllm_blend.features.cascade.backend import CascadeBackend
from vllm_blend.features.cascade.graphs import MAX_GROUPS, CascadeGraphs, Groups
from vllm_blend.features.cascade.passes import CascadePasses
from vllm_blend.features.cascade.planner import CascadePlanner, build_cascade_data_for_composition
from vllm_blend.outputs import RequestMetrics
from vllm_blend.request import Request
from vllm_blend.worker.batch import NOTHING_DRAWN, Drawn, Span, build_batch

PARAMS = greedy(7, logprobs=1, ignore_eos=True)
CPU = {"device": "cpu", "dtype": "float32"}
WINDOWED = tiny_model("mistral", sliding_window=20)


@contextmanager
def cascades(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Levels and requests of every step that is attended in parts."""
    seen: list[tuple[int, int]] = []
    init = CascadeBackend.__init__

    def counted(self: CascadeBackend, inner: Any, shared: Any, step: Any) -> None:
        seen.append((len(step.levels), step.own.num_requests))
        init(self, inner, shared, step)

    with monkeypatch.context() as patch:
        patch.setattr(CascadeBackend, "__init__", counted)
        yield seen


def answers(chunked: ChunkedLLM, **options: Any) -> list[RequestOutput]:
    """Questions over two contexts that begin alike, and one that shares nothing."""
    system = chunked.register_chunk(random_ids(19, 1), "system_prompt").id
    chunks = [chunked.register_chunk(random_ids(n, n)).id for n in (13, 10)]
    made = [chunked.compose(system, chunks, query=random_ids(3 + seed, seed), **options) for seed in range(3)]
    made += [chunked.compose(system, chunks[::-1], query=random_ids(4, seed), **options) for seed in range(3, 6)]
    made.append(chunked.compose(None, [], query=random_ids(20, 9), **options))
    for one in (made[0], made[3]):  # their pages are there when the others come
        chunked.batch_generate_from_chunks([one], PARAMS)
    return chunked.batch_generate_from_chunks(made, PARAMS)


@pytest.mark.parametrize("model", ["llama", "windowed"])
@pytest.mark.parametrize("backend", settings.current().backends)
@pytest.mark.parametrize(
    "options", [{"mode": "exact"}, {"mode": "reuse"}, {"selector": "first_tokens"}], ids=["exact", "reuse", "blend"]
)
def test_answers_do_not_change(
    options: dict[str, Any], backend: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: dict[str, Any] = {"attention_backend": backend} | ({"model": WINDOWED} if model == "windowed" else {})
    with chunked_llm(**arguments) as chunked:
        expected = answers(chunked, **options)
    with chunked_llm(cascade_attention=True, **arguments) as chunked:
        cascade = chunked.llm_engine.model_executor.driver_worker.extension(CascadePasses)
        monkeypatch.setattr(cascade.planner, "min_saved_blocks", 1)
        with cascades(monkeypatch) as seen:
            outputs = answers(chunked, **options)
    for left, right in zip(expected, outputs, strict=True):
        assert_same_logprobs(left, right)
    if settings.current().device == "cpu":
        levels, requests = max(seen)
        assert requests >= 6  # of 7: the last one shares nothing
        # Exact prefixes: the system prompt, then each pair's context. A blended context is shared as a whole.
        assert levels == (2 if options.get("mode") == "exact" else 1)


def test_little_sharing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with chunked_llm(cascade_attention=True) as chunked, cascades(monkeypatch) as seen:
        answers(chunked, mode="exact")
        assert not seen


def test_a_plan_serves_while_its_requests_stay_together() -> None:
    requests = [
        Request(name, [0], None, RequestMetrics(0.0), block_table=[1, 2, n]) for name, n in (("a", 3), ("b", 4))
    ]
    planner = CascadePlanner(block_size=4, min_saved_tokens=4)

    def plan(starts: list[int]) -> Any:
        return planner.plan([Span(r, start, start + 1) for r, start in zip(requests, starts, strict=True)])

    first = plan([8, 9])
    assert first is not None and first.own_start == (2, 2)
    requests[0].block_table.append(5)
    assert plan([12, 10]) is first
    shorter = plan([4, 10])
    assert shorter is not None and shorter.own_start == (1, 1)
    requests[1].block_table = [7, 2, 4]  # it has given its pages back and got others
    assert plan([12, 10]) is None


def test_groups_of_a_graph() -> None:
    planner = CascadePlanner(1, 1, max_levels=1)
    tables = [[1, 2, 9], [5, 6], [1, 2, 8], [7], [5, 6]]

    def groups(tables: list[list[int]], shareable: list[int]) -> Groups | None:
        padded = np.array([table + [0] * (3 - len(table)) for table in tables], np.int32)
        data = build_cascade_data_for_composition(padded, shareable, planner.min_saved_blocks, planner.max_levels)
        return None if data is None else Groups.from_plan(data, shareable)

    assert groups(tables, [2, 2, 2, 1, 1]) == Groups([0, 2, 1, 4, 3], [2, 2, 1], [2, 1, 1])
    assert groups(tables, [2, 2, 2, 0, 1]) is None  # nothing to be shared of one
    assert groups([*([[1]] * 2), *([n] for n in range(2, 2 + MAX_GROUPS))], [1] * (2 + MAX_GROUPS)) is None


@pytest.mark.cpu_only
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5, 6], [3, 0, 6, 4, 1, 5, 2]])
def test_a_graph_gives_the_hidden_states_of_plain_decoding(order: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With work that is done again in place of a CUDA graph: what it reads is right, for batches in any order, also
    where the host does not know the tokens. Three rows of the graph are unused."""
    monkeypatch.setattr("vllm_blend.features.cascade.graphs.SIZES", (len(order) + 3,))
    with chunked_llm(attention_backend="torch_native", **CPU) as chunked:
        runner = chunked.llm_engine.model_executor.driver_worker.model_runner

        def capture(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
            hidden = work()

            def replay() -> None:
                hidden.copy_(work())

            return replay, hidden

        with torch.inference_mode():
            planner = CascadePlanner(runner.cache.block_size, 1, max_levels=1)
            graphs = CascadeGraphs(runner.parts, planner, 16, 96, capture)
        compared = []
        execute = runner._execute

        def checked(items: Any) -> Any:
            result = execute(items)
            if all(item.is_decode for item in items) and len(items) == len(order):
                spans = [Span(items[index].request, items[index].start, items[index].stop) for index in order]
                hidden = graphs.run(spans, NOTHING_DRAWN)
                assert hidden is not None
                batch = build_batch(spans, runner.cache.block_size, torch.device("cpu"))
                with forward_context(ForwardContext(batch.metadata, runner.cache.layers, runner.parts.backend)):
                    expected = runner.model(batch.input_ids)
                torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=2e-4)
                drawn = Drawn({span.request: row for row, span in enumerate(spans)}, batch.input_ids)
                unknown = [Span(_Unread(span.request), span.start, span.stop) for span in spans]  # type: ignore[arg-type]
                again = graphs.run(unknown, drawn)
                assert again is not None
                torch.testing.assert_close(again, expected, rtol=1e-4, atol=2e-4)
                compared.append(hidden)
            return result

        runner._execute = checked  # type: ignore[method-assign]
        try:
            answers(chunked, mode="exact")
        finally:
            del runner._execute
        assert len(compared) >= 5


class _Unread:
    """A request whose last token is still on the device."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.block_table = request.block_table
        self.num_known_tokens = request.num_known_tokens - 1

    def __eq__(self, other: object) -> bool:
        return other is self._request

    def __hash__(self) -> int:
        return hash(self._request)
