"""What one tenant leaves in any tier is not there for another: nothing found or shared, no counter that differs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.blend.prompts import plain, tiny_prompt
from tests.chunks.llms import chunked_llm, random_ids
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import feature, greedy, new_llm, run, threads, tiny_model
from vllm_blend import LLM, RequestOutput
from vllm_blend.chunks.retention import retention_key
from vllm_blend.features.spec_decode.extension import SpeculativeDecoding
from vllm_blend.kv_store.export_folder import export_folder
from vllm_blend.kv_store.import_folder import NO_MODEL, import_folder
from vllm_blend.kv_store.store_config import DiskStoreConfig

TINY = tiny_model("llama")
PARAMS = greedy(6, logprobs=2, ignore_eos=True)
SALTS = ["tenant-a", "tenant-b", None]
TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "memory": lambda path: {},
    "disk": lambda path: {"chunk_store_path": str(path)},
    "disk, on second use": lambda path: {"chunk_store_path": str(path), "chunk_store_admit_on_second_use": True},
    "remote": lambda path: {"chunk_store_url": f"file://{path}"},
}
# Counters of time, and of all that is stored, whichever salt it has.
NOT_COMPARED = ("second", "_bytes", "_chunks", "step")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    with threads(1):
        yield


def salted(prompt: dict[str, Any], salt: str | None) -> dict[str, Any]:
    return {**prompt, "cache_salt": salt}


def counters(llm: LLM) -> dict[str, float]:
    values = {metric.name: metric.value for metric in llm.get_metrics()}
    return {name: value for name, value in values.items() if not any(part in name for part in NOT_COMPARED)}


def counted(llm: LLM, prompts: Any) -> tuple[list[RequestOutput], dict[str, float]]:
    """Return the outputs, and what these prompts have added to the engine's counters."""
    before = counters(llm)
    outputs = run(llm, prompts, PARAMS)
    assert llm.llm_engine.chunk_store.flush(120)
    return outputs, {name: value - before.get(name, 0) for name, value in counters(llm).items()}


def assert_unseen(outputs: list[RequestOutput], counts: dict[str, float], fresh: Any) -> None:
    """Check outputs and counts against `fresh`, those of an engine that has served no other request."""
    for output, expected in zip(outputs, fresh[0], strict=True):
        assert_same_logprobs(output, expected)
        assert (output.num_cached_tokens, output.num_found_tokens) == (0, {})
        assert output.blend == expected.blend
    assert counts == fresh[1]


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("first", "second"), [("tenant-a", "tenant-b"), ("tenant-a", None), (None, "tenant-a")])
def test_a_chunk_in_any_tier_serves_its_own_salt_alone(
    tier: str, first: str | None, second: str | None, tmp_path: Path
) -> None:
    """The engine that asks a tier below the memory has nothing in its own memory."""
    options = {"enable_blending": True, **TIERS[tier](tmp_path / "shared")}
    prompts = [tiny_prompt(), plain(tiny_prompt())]
    alone = new_llm(TINY, enable_blending=True, **TIERS[tier](tmp_path / "alone"))
    fresh = counted(alone, [salted(prompt, second) for prompt in prompts])
    llm = new_llm(TINY, **options)
    for _ in range(2):
        own = run(llm, [salted(prompt, first) for prompt in prompts], PARAMS)
    assert all(output.num_cached_tokens for output in own), "with the same salt, everything is found"
    counted(llm, [])
    reader = llm if tier == "memory" else new_llm(TINY, **options)
    outputs, counts = counted(reader, [salted(prompt, second) for prompt in prompts])
    assert_unseen(outputs, counts, fresh)
    if tier in ("disk", "remote"):
        [output] = run(reader, salted(tiny_prompt(), first), PARAMS)
        assert output.num_found_tokens == {tier: output.num_cached_tokens} and output.num_cached_tokens


@pytest.mark.parametrize("salt", SALTS)
def test_an_encoding_is_joined_only_by_requests_of_its_salt(salt: str | None) -> None:
    """When prompts come together, the first has its chunks encoded, and the others with its salt wait for them."""
    llm = new_llm(TINY, enable_blending=True)
    other = "tenant-c"
    first, stranger, joined = run(llm, [salted(tiny_prompt(), each) for each in (salt, other, salt)], PARAMS)
    assert first.blend is not None and first.blend == stranger.blend and first.num_cached_tokens == 0
    assert first.blend.num_encoded_tokens > 0
    assert joined.blend is not None and joined.blend.num_encoded_tokens == 0
    assert joined.num_found_tokens == {"joined": first.blend.num_encoded_tokens}
    assert llm.llm_engine.composer.num_encoded == 2 * 4, "prefix and chunks, once for each salt"
    assert {metric.name: metric.value for metric in llm.get_metrics()}["vllm_blend:found_tokens_joined"] == (
        first.blend.num_encoded_tokens
    )


def test_prefixes_shared_within_a_batch_have_one_salt() -> None:
    """Three prompts of one step: blocks are shared by salt, also as chunked prefill goes on."""
    llm = new_llm(TINY, block_size=16, max_num_batched_tokens=24, max_num_seqs=4)
    prompt = plain(tiny_prompt())
    run(llm, salted(prompt, "tenant-a"), PARAMS)
    found = [run(llm, salted(prompt, salt), PARAMS)[0].num_cached_tokens for salt in ("tenant-b", None, "tenant-a")]
    assert found[:2] == [0, 0] and found[2] == (len(prompt["prompt_token_ids"]) - 1) // 16 * 16 > 0


@pytest.mark.parametrize("salt", SALTS)
def test_what_encoding_a_chunk_leaves_in_the_prefix_cache_has_its_salt(salt: str | None) -> None:
    """The chunk's prefix is computed like a plain prompt, so it goes there."""
    llm = new_llm(TINY, enable_blending=True, block_size=16)
    prefix, chunk = random_ids(32, 1), random_ids(9, 2)
    llm.encode_chunks(prefix, [chunk], cache_salt=salt)
    for other in SALTS:
        [output] = run(llm, salted({"prompt_token_ids": [*prefix, 5]}, other), PARAMS)
        assert output.num_found_tokens == ({"prefix_cache": 32} if other == salt else {})


def test_a_retained_context_is_named_by_the_salt_itself() -> None:
    """The salts of its chunks alone would not do."""
    with chunked_llm() as chunked:
        chunk = chunked.register_chunk(random_ids(20, 1))
        parsed = chunked.compose(None, [chunk], query=[5], mode="reuse").parse()
        engine = chunked.llm_engine
        asked = engine.planner.plan(parsed)
        plain_key, salted_key = (
            retention_key(engine.fingerprint, replace(parsed, salt=salt), asked) for salt in (b"", b"salt")
        )
        assert plain_key is not None and salted_key is not None and plain_key.key != salted_key.key


def test_retained_contexts_and_registered_chunks() -> None:
    options: dict[str, Any] = {"mode": "reuse", "query": [5, 6, 7], "sampling_params": PARAMS}
    with chunked_llm() as chunked:
        ids = {salt: chunked.register_chunk(random_ids(20, 1), cache_salt=salt).id for salt in SALTS}
        assert len(set(ids.values())) == len(SALTS)
        for salt, chunk in ids.items():
            first, second = (chunked.generate_from_chunks(None, [chunk], **options, cache_salt=salt) for _ in range(2))
            assert first.blend is not None and not first.blend.retained
            assert first.num_cached_tokens == 20 and set(first.num_found_tokens) <= {"host", "device"}
            assert second.blend is not None and second.blend.retained
            assert second.num_found_tokens == {"retained": 20} and second.num_cached_tokens == 20
        with pytest.raises(ValueError, match="registered with another cache_salt"):
            chunked.compose(None, [ids["tenant-a"]], query=[5], cache_salt="tenant-b")
        with pytest.raises(ValueError, match="registered with another cache_salt"):
            chunked.compose(None, [ids[None]], query=[5], cache_salt="tenant-b")
        for salt, chunk in ids.items():
            exact: dict[str, Any] = {"query": [5, 6, 7], "mode": "exact", "cache_salt": salt}
            before = chunked.preview_composition(None, [chunk], **exact)
            output = chunked.generate_from_chunks(None, [chunk], sampling_params=PARAMS, **exact)
            after = chunked.preview_composition(None, [chunk], **exact)
            assert output.num_cached_tokens == 0 and before.num_computed_tokens == before.num_tokens
            assert after.num_computed_tokens < after.num_tokens


def test_chunks_encoded_ahead_exported_and_imported_keep_their_salt(tmp_path: Path) -> None:
    prompt = tiny_prompt()
    pieces = (prompt["prefix"], prompt["chunks"])
    writer = new_llm(TINY, enable_blending=True, chunk_store_path=str(tmp_path / "a"))
    writer.encode_chunks(*pieces, cache_salt="tenant-a")
    store = writer.llm_engine.chunk_store
    assert store.below and store.flush(120)
    assert export_folder(tmp_path / "a", tmp_path / "folders")["written"] == 4
    import_folder(tmp_path / "folders", DiskStoreConfig(tmp_path / "b", 1 << 30, NO_MODEL))
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"tenant-a" not in path.read_bytes(), path
    reader = new_llm(TINY, enable_blending=True, chunk_store_path=str(tmp_path / "b"))
    stranger, own = (run(reader, salted(prompt, salt), PARAMS)[0] for salt in ("tenant-b", "tenant-a"))
    assert stranger.num_found_tokens == {} and own.num_found_tokens == {"disk": own.num_cached_tokens}
    assert stranger.blend is not None and own.num_cached_tokens == stranger.blend.num_encoded_tokens
    loaded = new_llm(TINY, enable_blending=True)
    _, chunks = writer.llm_engine.identify_chunks(*pieces, cache_salt="tenant-a")
    for chunk, kv in zip(chunks, writer.encode_chunks(*pieces, cache_salt="tenant-a"), strict=True):
        loaded.load_chunk(chunk, kv)
    num_tokens = sum(map(len, prompt["chunks"]))
    for salt, found in ((None, 0), ("tenant-a", num_tokens)):
        [output] = run(loaded, {**salted(prompt, salt), "blend_selector": "none"}, PARAMS)
        assert output.num_cached_tokens == found


def test_drafts_copied_from_chunks_have_one_salt() -> None:
    llm = new_llm(TINY, enable_blending=True, speculative_config={"method": "suffix", "num_speculative_tokens": 3})
    drafter: Any = feature(llm.llm_engine, SpeculativeDecoding).speculator.drafter
    cache = drafter.chunks
    built = []
    for salt in ("tenant-a", "tenant-a", "tenant-b", None):
        run(llm, salted(tiny_prompt(), salt), PARAMS)
        built.append(cache.num_built)
    assert built == [3, 3, 6, 9]


def test_a_salt_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    llm = new_llm(TINY, enable_blending=True)
    with caplog.at_level(logging.DEBUG):
        run(llm, [salted(tiny_prompt(), "tenant-a"), salted({"chunks": [[1]], "suffix": []}, "tenant-a")], PARAMS)
    assert "refused" in caplog.text and "tenant-a" not in caplog.text
