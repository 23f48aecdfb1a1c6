"""Chunks in the engine, encoded after each of the contexts: what is stored, under which key, and what is exact."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tolerances
from tests.blend.prompts import assert_counts_add_up, tiny_prompt
from tests.blend.test_reference import pieces_of, projected
from tests.engine.compare import assert_identical, assert_logprobs_match, assert_same_logprobs
from tests.engine.engines import DEMO, demo_prompt, engine, greedy, hf_model, memory_store, new_llm, run, tiny_model
from vllm_blend.blend.encoding_contexts import ENCODING_CONTEXTS, ContextPieces

PARAMS = greedy(3, logprobs=2)
PASSAGES = 5
CONTINUES = [None, 0, None, 2, None]
AFTER = ["", "Salt is old.\n\n", "", "Bread is new.\n\n", "Salt is old.\n\n"]
NAMES = list(ENCODING_CONTEXTS)


def prompt(index: int = 3, passages: int = PASSAGES, **options: Any) -> Any:
    about = {"continues": CONTINUES[:passages], "encode_after": AFTER[:passages]}
    return demo_prompt(index, passages=passages, **{**about, **options})


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """A context. The tests of one follow each other, so that they share its engine."""
    return str(request.param)


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 40])
def test_stored_chunks_equal_an_independent_forward(name: str, max_num_batched_tokens: int) -> None:
    """The independent forward is over what stands before the chunk, and the chunk."""
    arguments: dict[str, Any] = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": 8}
    with engine(enable_blending=True, blend_encoding_context=name, **arguments) as llm:
        inner = llm.llm_engine
        run(llm, prompt(), greedy(1))
        prefix, chunks, _ = pieces_of(llm, prompt())
        after = tuple(tuple(llm.get_tokenizer().encode(text, add_special_tokens=False)) for text in AFTER)
        pieces = ContextPieces(tuple(prefix), tuple(map(tuple, chunks)), tuple(CONTINUES), after)
        _, ids = inner.identify_chunks(prompt()["prefix"], prompt()["chunks"], CONTINUES, AFTER)
        for index, (chunk_id, own) in enumerate(zip(ids, chunks, strict=True)):
            before = inner.composer.finder.encoding.before(pieces, index, 500)
            stored = inner.chunk_store.get(chunk_id.key)
            assert stored is not None and stored.num_tokens == len(own)
            for layer, (k, v) in enumerate(projected([*before, *own])):
                tolerances.check_kv(stored.k[layer].flatten(1), k[len(before) :])
                tolerances.check_kv(stored.v[layer].flatten(1), v[len(before) :])


def test_ratio_1_is_full_prefill(name: str) -> None:
    with engine(enable_blending=True, blend_encoding_context=name) as llm:
        for rule in ("value_deviation", "value_deviation", "question_attention", "full"):  # new chunks, then known ones
            [output] = run(llm, prompt(blend_selector=rule, blend_recompute_ratio=1.0), PARAMS)
            assert_logprobs_match(output, hf_model(DEMO))
            assert_counts_add_up(output)
            assert output.blend is not None and output.blend.num_reused_tokens == 0


def test_ratio_1_is_full_prefill_where_there_is_hardly_room_for_a_context(name: str) -> None:
    tiny = tiny_model("llama")  # of 96 positions, so that no filler fits
    with engine(tiny, enable_blending=True, blend_encoding_context=name) as llm:
        [output] = run(llm, tiny_prompt(blend_recompute_ratio=1.0, continues=[None, 0, 1, None]), PARAMS)
        assert_logprobs_match(output, hf_model(tiny))


@pytest.mark.parametrize(("name", "exact"), [("prefix", [0]), ("page", [0, 1]), ("filler", []), ("bos", [])])
def test_a_chunk_that_stands_where_it_was_encoded_is_exact(name: str, exact: list[int]) -> None:
    with engine(enable_blending=True, blend_encoding_context=name) as llm:
        run(llm, prompt(), PARAMS)
        [output] = run(llm, prompt(blend_selector="none"), PARAMS)
        prefix, chunks, _ = pieces_of(llm, prompt())
        assert output.blend is not None
        assert output.blend.num_exact_tokens == len(prefix) + sum(len(chunks[i]) for i in exact)


def test_a_page_that_is_the_whole_prompt_is_full_prefill_without_recomputing() -> None:
    alone = prompt(continues=[None, 0, 1, 2, 3], blend_selector="none")
    with engine(enable_blending=True, blend_encoding_context="page") as llm:
        run(llm, alone, PARAMS)
        [output] = run(llm, alone, PARAMS)
        assert output.blend is not None and output.blend.num_reused_tokens == 0 < output.blend.num_exact_tokens
        assert_logprobs_match(output, hf_model(DEMO))


def test_by_default_chunks_are_encoded_after_filler_and_their_page() -> None:
    """Keys name what a chunk was encoded after, so equal ones hold equal KV."""
    keys: dict[str, list[list[str]]] = {}
    for name in ("", "filler", "page", "prefix"):
        with engine(enable_blending=True, blend_encoding_context=name or None) as llm:
            inner, given = llm.llm_engine, prompt()
            asked = [inner.identify_chunks(given["prefix"], given["chunks"], page) for page in (CONTINUES, None)]
            keys[name] = [[chunk.key for chunk in chunks] for _, chunks in asked]
    assert keys[""] == keys["filler"]
    assert not {*keys["filler"][0]} & {*keys["page"][0]}
    assert [key in keys["prefix"][0] for key in keys["page"][0]] == [before is None for before in CONTINUES]
    assert keys["page"][1] == keys["prefix"][1] == keys["prefix"][0]


def test_without_a_tokenizer_there_is_no_filler() -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "blend_encoding_context": None}
    with engine(tiny_model("llama"), enable_blending=True, **options) as llm:
        assert llm.llm_engine.composer.finder.encoding.name == "page"


def test_filler_is_computed_once_for_a_prefix() -> None:
    """Chunks wait for it, also those of prompts that come together, and of another prefix there is another."""
    tiny = [tiny_prompt(cache_salt=salt) for salt in ("a" * 32, "a" * 32, "b" * 32)]
    roomy = tiny_model("llama", max_position_embeddings=1024)
    with engine(roomy, enable_blending=True, blend_encoding_context=None) as llm:
        inner = llm.llm_engine
        encoded, rows = inner.composer.num_encoded, len(tiny[0]["chunks"])
        run(llm, tiny, greedy(1))
        assert inner.composer.num_encoded - encoded == 2 * (
            1 + 1 + rows - 1
        )  # prefix, filler, chunks (one is there twice)


def test_batch_mates_and_the_question_change_nothing_of_what_is_stored(name: str) -> None:
    one = prompt(passages=3)
    prompts = [one, {**one, "suffix": "Question: Who?\nAnswer:"}, prompt(7, 3), {**one, "continues": [None] * 3}]
    with engine(enable_blending=True, blend_encoding_context=name) as llm:
        inner = llm.llm_engine
        together = run(llm, prompts, PARAMS)
        store = memory_store(llm)
        known = set(store._chunks)
        for each, output in zip(prompts, together, strict=True):
            inner.chunk_store.clear()
            [alone] = run(llm, each, PARAMS)
            assert set(store._chunks) <= known
            assert_same_logprobs(output, alone)
        assert_identical(run(llm, prompts[-1], PARAMS)[0], run(llm, prompts[-1], PARAMS)[0])


def test_contexts_never_mix_and_nothing_is_computed_twice() -> None:
    keys: dict[str, list[str]] = {}
    for name in NAMES:
        with engine(enable_blending=True, blend_encoding_context=name) as llm:
            inner = llm.llm_engine
            encoded = inner.composer.num_encoded
            for _ in range(2):
                run(llm, prompt(), greedy(1))
            assert inner.composer.num_encoded - encoded == 1 + PASSAGES + (name == "filler")
            _, ids = inner.identify_chunks(prompt()["prefix"], prompt()["chunks"], CONTINUES, AFTER)
            keys[name] = [chunk.key for chunk in ids]
    assert len({key for name in ("prefix", "bos", "filler") for key in keys[name][2:]}) == 3 * 3
    assert keys["page"][0] == keys["prefix"][0]  # after the prefix in both
    assert keys["given"][0] == keys["prefix"][0] and keys["given"][1] not in (keys["prefix"][1], keys["page"][1])
    assert not {*keys["page"]} & {*keys["filler"]}


def test_what_is_encoded_ahead_serves_every_place() -> None:
    with engine(enable_blending=True, blend_encoding_context="filler", blend_selector="none") as llm:
        one = prompt(continues=None)
        for chunk in one["chunks"]:
            [kv] = llm.encode_chunks(one["prefix"], [chunk])
            assert kv.num_tokens == len(llm.get_tokenizer().encode(chunk, add_special_tokens=False))
        for order in (one["chunks"], one["chunks"][::-1], one["chunks"][2:3]):
            [output] = run(llm, {**one, "chunks": order, "encode_after": None}, PARAMS)
            assert output.blend is not None and output.blend.num_encoded_tokens == 0
        assert output.blend is not None
        assert output.blend.num_reused_tokens == 0 < output.blend.num_exact_tokens  # one chunk is alone in the last
        assert_logprobs_match(output, hf_model(DEMO))


@pytest.mark.parametrize(
    ("continues", "error", "message"),
    [
        ("0", TypeError, "continues must be a list with one chunk number or None per chunk, not str"),
        ([None], ValueError, "continues has 1 entries for 4 chunks"),
        ([None, 1, None, None], ValueError, r"continues\[1\] is 1: name a chunk that stands before chunk 1"),
        ([None, -1, None, None], ValueError, r"continues\[1\] is -1"),
        ([None, "a", None, None], TypeError, r"continues\[1\] is 'a': give the number of a chunk"),
        ([None, False, None, None], TypeError, r"continues\[1\] is False: give the number of a chunk"),
        ({1: 0}, TypeError, "continues must be a list with one chunk number or None per chunk, not dict"),
    ],
)
def test_pages_that_cannot_be(continues: Any, error: type[Exception], message: str) -> None:
    with engine(tiny_model("llama"), enable_blending=True) as llm, pytest.raises(error, match=message):
        run(llm, tiny_prompt(continues=continues), PARAMS)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a", "encode_after must be a list with text or token ids for each of the 4 chunks"),
        (["a"], "encode_after must be a list with text or token ids for each of the 4 chunks"),
        ([[], [], [10**6], []], r"encode_after\[2\]\[0\] is 1000000, out of vocabulary"),
    ],
)
def test_what_cannot_be_encoded_after(given: Any, message: str) -> None:
    with engine(tiny_model("llama"), enable_blending=True) as llm, pytest.raises(ValueError, match=message):
        run(llm, tiny_prompt(encode_after=given), PARAMS)


@pytest.mark.cpu_only
def test_settings_that_cannot_be_are_errors_at_the_start() -> None:
    tiny = tiny_model("llama")
    with pytest.raises(ValueError, match="blend_encoding_context='alone' is unknown"):
        new_llm(tiny, enable_blending=True, blend_encoding_context="alone")
    with pytest.raises(ValueError, match=r"there are 1 to 10 filler passages"):
        new_llm(tiny, enable_blending=True, blend_encoding_context="filler(11)")


@pytest.mark.parametrize("same", [True, False])
def test_a_chunk_is_exact_after_the_same_tokens_not_after_as_many(same: bool) -> None:
    ids = [(7 * i * i + 3 * i + 1) % 100 + 3 for i in range(40)]
    prefix, first, second, suffix = ids[:5], ids[5:17], ids[17:30], ids[30:36]
    after = first if same else first[::-1]
    given = {"prefix": prefix, "chunks": [first, second], "suffix": suffix, "encode_after": [[], after]}
    tiny = tiny_model("llama")
    with engine(tiny, enable_blending=True, blend_encoding_context="given", blend_selector="none") as llm:
        run(llm, given, PARAMS)
        [output] = run(llm, given, PARAMS)
        assert output.blend is not None
        assert output.blend.num_exact_tokens == 17 + (13 if same else 0)
        assert output.blend.num_reused_tokens == (0 if same else 13)
