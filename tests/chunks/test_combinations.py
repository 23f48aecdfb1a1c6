"""Chunks together with the engine's other features, and all of it at once, in any order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.chunks.llms import chunked_llm, new_chunked_llm, random_compositions, random_ids
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import BLOCK_SIZE, assert_empty, greedy
from vllm_blend import ChunkedLLM, RequestOutput
from vllm_blend.chunks.chunk import OutOfChunkMemoryError, UnknownChunkError
from vllm_blend.features.cascade.passes import CascadePasses

PARAMS = greedy(8, logprobs=1, ignore_eos=True)
FEATURES: dict[str, dict[str, Any]] = {
    "ahead": {"async_scheduling": True},
    "ahead, cascade": {"async_scheduling": True, "cascade_attention": True},
    "speculating": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    "chunks away": {"offload_mode": "exact", "offload_device_fraction": 0.3, "offload_host_gib": 0.01},
    "small steps": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
    "few pages": {"num_gpu_blocks_override": 96 // BLOCK_SIZE + 4, "max_num_seqs": 5},
    "no prefix cache": {"enable_prefix_caching": False},
}
OPTIONS: list[dict[str, Any]] = [{"recompute_ratio": 1.0}, {"mode": "reuse"}, {"selector": "first_tokens"}]


def outputs_of(chunked: ChunkedLLM, options: dict[str, Any], retain: bool) -> list[RequestOutput]:
    made = random_compositions(chunked, 12, **options, retain=retain)
    return chunked.batch_generate_from_chunks(made + made[:6], PARAMS)


@pytest.mark.parametrize("feature", FEATURES)
def test_answers_are_those_of_a_plain_engine(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in OPTIONS:
        with chunked_llm() as chunked:
            expected = outputs_of(chunked, options, retain=False)
        with chunked_llm(**FEATURES[feature]) as chunked:
            for extension in chunked.llm_engine.model_executor.driver_worker.extensions:
                if isinstance(extension, CascadePasses):
                    monkeypatch.setattr(extension.planner, "min_saved_blocks", 1)
            outputs = outputs_of(chunked, options, retain=True)
        for left, right in zip(expected, outputs, strict=True):
            assert_same_logprobs(left, right)
        assert any(output.blend is not None and output.blend.retained for output in outputs)


def test_registered_chunks_outlive_the_process(tmp_path: Path) -> None:
    """They are on the disk: registering them again reads what was computed. Deleting one deletes it there too."""
    ids = random_ids(20, 1)
    for computed in (1, 0, 1):
        chunked = new_chunked_llm(chunk_store_path=str(tmp_path))
        engine = chunked.llm_engine
        chunk = chunked.register_chunk(ids)
        assert engine.composer.num_encoded == computed
        output = chunked.generate_from_chunks(None, [chunk.id], query=[5, 6], sampling_params=PARAMS, mode="reuse")
        assert output.blend is not None and output.blend.num_exact_tokens == len(ids)
        if computed == 0:
            assert chunked.delete_chunk(chunk.id).num_bytes == 20 * engine.composer.bytes_per_token
        engine.chunk_store.flush()
        engine.chunk_store.close()
        assert_empty(chunked.llm)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ahead", [False, True])
def test_anything_in_any_order(seed: int, ahead: bool) -> None:
    """Registering, deleting, asking, reading streams a little and dropping them, in an engine with few pages and little
    memory for chunks: no answer changes, and in the end everything is back."""
    generator = random.Random(seed)
    contents = [random_ids(n, 50 + n) for n in (3, 6, 9, 12, 15, 18)]
    with chunked_llm() as probe:
        token = probe.llm_engine.composer.bytes_per_token
        probe_ids = [probe.register_chunk(content).id for content in contents]
        known: dict[tuple[Any, ...], RequestOutput] = {}

        def expected(order: tuple[int, ...], question: int, mode: str) -> RequestOutput:
            key = (order, question, mode)
            if key not in known:
                known[key] = probe.generate_from_chunks(
                    None, [probe_ids[i] for i in order], query=random_ids(4, question), sampling_params=PARAMS,
                    mode=mode, retain=False,
                )  # fmt: skip
            return known[key]

        arguments: dict[str, Any] = {
            "num_gpu_blocks_override": 160 // BLOCK_SIZE + 1,
            "blend_chunk_cache_gib": 45 * token / 2**30,
        }
        with chunked_llm(async_scheduling=ahead, max_num_seqs=4, **arguments) as chunked:
            streams: list[tuple[Iterator[RequestOutput], tuple[Any, ...]]] = []
            registered: dict[int, str] = {}
            for _ in range(120):
                action = generator.choice(["register", "delete", "ask", "ask", "stream", "read", "read", "drop"])
                if action == "register":
                    index = generator.randrange(len(contents))
                    with suppress(OutOfChunkMemoryError):  # the streams may hold all that there is
                        registered[index] = chunked.register_chunk(contents[index]).id
                elif action == "delete" and registered:
                    index = generator.choice(sorted(registered))
                    chunk_id = registered.pop(index)
                    deletion = chunked.delete_chunk(chunk_id)
                    with pytest.raises(UnknownChunkError):
                        chunked.compose(None, [chunk_id], query=[5])
                    assert deletion.deferred == (deletion.num_references > 0)
                elif action in ("ask", "stream") and registered and len(streams) < 4:
                    order = tuple(generator.choice(sorted(registered)) for _ in range(generator.randrange(1, 4)))
                    case = (order, generator.randrange(3), generator.choice(["exact", "reuse"]))
                    asked = chunked.generate_from_chunks(
                        None, [registered[i] for i in order], query=random_ids(4, case[1]), sampling_params=PARAMS,
                        mode=case[2], stream=True,
                    )  # fmt: skip
                    if action == "stream":
                        streams.append((asked, case))
                    else:
                        *_, output = asked
                        assert_same_logprobs(output, expected(*case))
                elif action == "read" and streams:
                    index = generator.randrange(len(streams))
                    last = next(streams[index][0], None)
                    if last is None or last.finished:
                        case = streams.pop(index)[1]
                        if last is not None:
                            assert_same_logprobs(last, expected(*case))
                elif action == "drop" and streams and generator.random() < 0.3:
                    streams.pop(generator.randrange(len(streams)))
            streams.clear()
            asked = None  # type: ignore[assignment]
