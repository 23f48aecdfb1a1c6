"""Registering computes the KV that a plain forward pass gives, once, and says what is wrong before anything runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import tolerances
from tests.chunks.llms import TINY, chunked_llm, random_ids
from tests.engine.engines import BLOCK_SIZE, DEMO, greedy, hf_model, tiny_model
from vllm_blend import ChunkedLLM, chunks
from vllm_blend.chunks.chunk import ChunkInUseError, ChunkType, OutOfChunkMemoryError, UnknownChunkError
from vllm_blend.chunks.composition import ChunkComposition, Part
from vllm_blend.core.block_manager import OutOfBlocks

MODELS = {
    "llama": TINY,
    "mistral-window": tiny_model("mistral", sliding_window=20),
    "qwen2": tiny_model("qwen2"),
    "qwen3": tiny_model("qwen3"),
    "demo": DEMO,  # its tokenizer begins with BOS, the tiny one does not
}
PARAMS = greedy(3, ignore_eos=True)


@torch.inference_mode()
def reference_kv(directory: str, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """K before RoPE and V of every layer, [layers, tokens, kv_heads * head_dim], from transformers."""
    model = hf_model(directory)
    seen: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    handles = []
    for layer in model.model.layers:
        attention = layer.self_attn
        last_of_k = getattr(attention, "k_norm", attention.k_proj)
        for name, module in (("k", last_of_k), ("v", attention.v_proj)):
            handles.append(
                module.register_forward_hook(lambda _m, _i, out, name=name: seen[name].append(out[0].flatten(1)))
            )
    model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return torch.stack(seen["k"]), torch.stack(seen["v"])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("max_num_batched_tokens", [None, 16], ids=["at once", "in pieces"])
def test_kv_equals_a_reference_forward(model: str, max_num_batched_tokens: int | None) -> None:
    arguments: dict[str, Any] = (
        {} if max_num_batched_tokens is None else {"max_num_batched_tokens": 16, "max_num_seqs": 16}
    )
    with chunked_llm(MODELS[model], **arguments) as chunked:
        system = chunked.register_chunk(random_ids(14, 1), "SYSTEM_PROMPT")
        cases = [system, chunked.register_chunk(random_ids(40, 2)), chunked.register_chunk([5])]
        cases.append(chunked.register_chunk(random_ids(9, 3), after=system.id))
        bos = model == "demo"
        assert [len(chunk.context_token_ids) for chunk in cases] == [bos, bos, bos, bos + 14]
        for chunk in cases:
            kv = chunked.llm_engine.chunk_store.get(chunk.id)
            assert kv is not None and kv.num_tokens == len(chunk) == chunk.length
            wanted = reference_kv(MODELS[model], [*chunk.context_token_ids, *chunk.token_ids])
            for ours, theirs in zip((kv.k, kv.v), wanted, strict=True):
                for layer, (got, expected) in enumerate(
                    zip(ours, theirs[:, len(chunk.context_token_ids) :], strict=True)
                ):
                    assert layer < len(wanted[0])
                    tolerances.check_kv(got.flatten(1), expected)


def test_equal_content_is_registered_and_computed_once() -> None:
    with chunked_llm() as chunked:
        engine = chunked.llm_engine
        before = engine.composer.num_encoded
        first = chunked.register_chunk([5, 6, 7], name="a", metadata={"page": 1})
        again = chunked.register_chunk((5, 6, 7), "output", name="b", metadata={"source": "x"})
        assert again is first and engine.composer.num_encoded == before + 1
        [info] = chunked.list_chunks()
        assert (info.chunk, info.name, dict(info.metadata)) == (first, "b", {"page": 1, "source": "x"})
        assert info.num_bytes == 3 * engine.composer.bytes_per_token
        assert chunked.get_chunk("b").chunk is first
        with pytest.raises(UnknownChunkError, match="'a' is unknown"):
            chunked.get_chunk("a")
        other = chunked.register_chunk([5, 6, 7], "system_prompt")
        query = chunked.register_chunk([5, 6, 7], "query")
        assert len({first.id, query.id, other.id}) == 3 and other.chunk_type is ChunkType.SYSTEM_PROMPT
        assert chunked.get_chunk(query.id).num_bytes == 0
        assert [info.chunk for info in chunked.list_chunks("query")] == [query]


def test_text_is_tokenized_once_and_alone() -> None:
    with chunked_llm() as chunked:
        tokenizer = chunked.get_tokenizer()
        chunk = chunked.register_chunk("The quick brown fox.")
        assert list(chunk.token_ids) == tokenizer.encode("The quick brown fox.", add_special_tokens=False)
        made = chunked.compose(None, [chunk.id], query=" jumps over")
        assert made.token_ids == [
            *chunk.token_ids,
            *tokenizer.encode(" jumps over", add_special_tokens=False),
        ]


def test_what_can_be_wrong() -> None:
    with chunked_llm() as chunked:
        chunk = chunked.register_chunk([5, 6, 7], name="a")
        query = chunked.register_chunk([5], ChunkType.QUERY)
        system = chunked.register_chunk([8, 9], "system_prompt")
        vocabulary = chunked.llm_engine.hf_config.vocab_size
        ask: dict[str, Any] = {"query": [5, 6]}
        with pytest.raises(TypeError, match="stream"):
            chunked.generate_and_retain_output(None, ["a"], stream=True, **ask)
        encoded = chunked.llm_engine.composer.num_encoded
        for wrong, said in (
            (lambda: chunked.register_chunk([8, 7], name="b", metadata=[1]), "metadata is a list"),  # type: ignore[arg-type]
            (lambda: chunked.register_chunk([8, 7], name=3), "name=3 is an int"),  # type: ignore[arg-type]
            (lambda: chunked.delete_chunk(3), "named by 3, an int"),  # type: ignore[arg-type]
            (lambda: chunked.compose(None, "a", **ask), "context_chunk_ids is a str: give a list of ids"),
            (lambda: chunked.compose(None, None, **ask), "context_chunk_ids is a NoneType"),  # type: ignore[arg-type]
            (lambda: chunked.compose(None, chunk, **ask), "context_chunk_ids is a Chunk"),  # type: ignore[arg-type]
            (lambda: chunked.compose(None, [3], **ask), "named by 3, an int"),  # type: ignore[list-item]
            (lambda: chunked.batch_generate_from_chunks(ask), "compositions is a dict"),  # type: ignore[arg-type]
            (
                lambda: chunked.generate_from_chunks(None, ["a"], sampling_params={"n": 1}, **ask),  # type: ignore[call-overload]
                "sampling_params is a dict: give SamplingParams",
            ),
        ):
            with pytest.raises(TypeError, match=said):
                wrong()
        assert len(chunked.list_chunks()) == 3 and chunked.llm_engine.composer.num_encoded == encoded
        unknown: Any = "fast"
        for call, message in (
            (lambda: chunked.register_chunk([]), "the chunk is empty"),
            (lambda: chunked.register_chunk(""), "the chunk is empty"),
            (lambda: chunked.register_chunk([5] * 96), "96 tokens and 0 stand before it, but max_model_len=96"),
            (lambda: chunked.register_chunk([vocabulary]), rf"content\[0\] is {vocabulary}"),
            (lambda: chunked.register_chunk([5], "passage"), "chunk_type='passage' is unknown"),
            (lambda: chunked.register_chunk([5], name="a"), "name='a' is empty, or names another chunk"),
            (lambda: chunked.register_chunk([5], name=chunk.id), "names another chunk"),
            (lambda: chunked.register_chunk([5], "query", after=system.id), "after=.* is for context"),
            (lambda: chunked.register_chunk([5], after="a"), "after: chunk 'a' is of type CONTEXT, not SYSTEM_PROMPT"),
            (lambda: chunked.delete_chunk("absent"), "chunk 'absent' is unknown"),
            (lambda: chunked.unpin_chunk("a"), "'a' is not pinned"),
            (lambda: chunked.compose("absent", ["a"], **ask), "chunk 'absent' is unknown"),
            (
                lambda: chunked.compose("a", [], **ask),
                "system_chunk_id: chunk 'a' is of type CONTEXT, not SYSTEM_PROMPT",
            ),
            (
                lambda: chunked.compose(None, ["a", query.id], **ask),
                r"context_chunk_ids\[1\]: .* QUERY, not CONTEXT or",
            ),
            (lambda: chunked.compose(None, ["a"], "Who was it?"), "no chunk is 'Who was it.': .* text as query"),
            (lambda: chunked.compose(None, ["a"]), "give the question either as"),
            (lambda: chunked.compose(None, ["a"], query.id, [5]), "give the question either as"),
            (lambda: chunked.compose(None, ["a"], query=[]), "the query is empty"),
            (lambda: chunked.compose(None, ["a"], mode=unknown, **ask), "mode='fast' is unknown"),
            (lambda: chunked.compose(None, ["a"], mode="reuse", recompute_ratio=0.5, **ask), "mode='reuse' says what"),
            (
                lambda: chunked.generate_from_chunks(None, ["a"] * 32, **ask),
                "prompt has 98 tokens, but max_model_len=96",
            ),
            (lambda: chunked.generate_from_chunks(None, ["a"], recompute_ratio=2, **ask), "ratio=2 is a share"),
            (lambda: chunked.generate_from_chunks(None, ["a"], selector="best", **ask), "best"),
            (lambda: chunked.batch_generate_from_chunks([{"query": [5]}], [PARAMS, PARAMS]), "2 sampling_params for 1"),
            (
                lambda: chunked.batch_generate_from_chunks(
                    [chunked.compose(None, ["a"], **ask), chunked.compose(None, ["a"] * 32, **ask)], PARAMS
                ),
                "prompt has 98 tokens",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                call()
            assert not chunked.llm_engine.has_unfinished_requests()
        assert {info.num_references for info in chunked.list_chunks()} == {0}
        assert len(chunked.list_chunks()) == 3


def test_a_chunk_may_stand_for_its_id() -> None:
    with chunked_llm() as chunked:
        system = chunked.register_chunk([8, 9], "system_prompt")
        chunk = chunked.register_chunk([5, 6, 7], after=system)
        query = chunked.register_chunk([5], "query")
        made = chunked.compose(system, [chunk, chunk], query)
        assert made == chunked.compose(system.id, [chunk.id, chunk.id], query.id)
        chunked.pin_chunk(chunk)
        with pytest.raises(ChunkInUseError, match=f"chunk '{chunk.id}' is pinned"):
            chunked.delete_chunk(chunk)
        chunked.unpin_chunk(chunk)
        assert chunked.get_chunk(chunk).chunk is chunk
        assert chunked.delete_chunk(chunk).chunk_id == chunk.id
        with pytest.raises(UnknownChunkError, match=f"chunk '{chunk.id}' is unknown"):
            chunked.compose(system, [chunk], query)


def test_KV_stands_for_no_other_tokens() -> None:
    """A composition that was put together by hand, of a part or a chunk with tokens that the stored KV is not of."""
    with chunked_llm() as chunked:
        chunk = chunked.register_chunk([5, 6, 7])
        with pytest.raises(ValueError, match=f"3 token ids that are not those of its chunk '{chunk.id}'"):
            Part((5, 6, 8), "context", chunk)
        forged = replace(chunk, token_ids=(5, 6, 8))
        made = ChunkComposition((Part(forged.token_ids, "context", forged), Part((5,), "query")))
        with pytest.raises(ValueError, match=f"chunk '{chunk.id}' of the composition is not what is registered"):
            chunked.batch_generate_from_chunks([made], PARAMS)
        assert not chunked.llm_engine.has_unfinished_requests() and not chunked.delete_chunk(chunk).deferred


def test_memory_for_chunks_runs_out() -> None:
    """The least recently used chunks leave, unless they are pinned; their ids stay good. Then there is an error with
    the numbers, and nothing has changed."""
    with chunked_llm() as probe:
        token = probe.llm_engine.composer.bytes_per_token
    with chunked_llm(blend_chunk_cache_gib=30 * token / 2**30) as chunked:
        first = chunked.register_chunk(random_ids(10, 1), name="first")
        second = chunked.register_chunk(random_ids(10, 2))
        chunked.pin_chunk("first")
        third = chunked.register_chunk(random_ids(20, 3))
        sizes = [chunked.get_chunk(chunk.id).num_bytes for chunk in (first, second, third)]
        assert sizes == [10 * token, 0, 20 * token]
        with pytest.raises(
            OutOfChunkMemoryError, match=f"takes {21 * token} bytes .* {30 * token} only {20 * token} are"
        ):
            chunked.register_chunk(random_ids(21, 4))
        assert len(chunked.list_chunks()) == 3
        [output] = chunked.batch_generate_from_chunks([chunked.compose(None, [second.id], query=[5])], PARAMS)
        assert output.blend is not None and output.blend.num_chunks == 1
        assert chunked.get_chunk(second.id).num_bytes == 10 * token  # computed again, and kept
        with pytest.raises(ChunkInUseError, match="pinned 1 time"):
            chunked.delete_chunk("first")
        chunked.unpin_chunk("first")
        assert chunked.delete_chunk("first").num_bytes == 10 * token


def test_pages_run_out() -> None:
    """Registering beside running requests takes what they leave, and gives everything back."""
    with chunked_llm(num_gpu_blocks_override=96 // BLOCK_SIZE + 1, max_num_seqs=2) as chunked:
        blocks = chunked.llm_engine.blocks
        stream = chunked.generate_from_chunks(
            None, [], query=random_ids(50, 1), sampling_params=greedy(30, ignore_eos=True), stream=True
        )
        next(stream)
        free = blocks.num_free_blocks
        chunk = chunked.register_chunk(random_ids(20, 2))
        assert blocks.num_free_blocks == free
        with pytest.raises(OutOfBlocks, match=rf"needs 11 pages .* {free} of {blocks.num_usable_blocks} are free"):
            chunked.register_chunk(random_ids(11 * BLOCK_SIZE - 3, 3))
        assert blocks.num_free_blocks == free and chunk.id in chunked.llm_engine.chunk_registry
        assert len(list(stream)) == 29


def test_a_stream_runs_beside_other_calls() -> None:
    with chunked_llm() as chunked:
        chunk = chunked.register_chunk(random_ids(12, 1))
        arguments: dict[str, Any] = {"query": [7, 8], "sampling_params": greedy(8, ignore_eos=True), "mode": "reuse"}
        expected = chunked.generate_from_chunks(None, [chunk.id], **arguments)
        stream = chunked.generate_from_chunks(None, [chunk.id], stream=True, **arguments)
        seen = [next(stream)]
        other = chunked.generate_from_chunks(None, [chunk.id], **arguments)
        assert other.outputs == expected.outputs
        [plain] = chunked.llm.generate({"prompt_token_ids": [5, 6, 7]}, greedy(20, ignore_eos=True), use_tqdm=False)
        assert len(plain.outputs[0].token_ids) == 20  # long after the stream's request has finished
        seen += list(stream)
        assert [len(output.outputs[0].token_ids) for output in seen] == list(range(1, 9))
        assert seen[-1].outputs == expected.outputs
        stream = chunked.generate_from_chunks(None, [chunk.id], stream=True, **arguments)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert list(stream) == []
        assert not chunked.llm_engine.has_unfinished_requests()


def test_a_batch_that_is_refused_leaves_nothing_behind() -> None:
    """Nothing stays even while the error is held, as it is in an interactive session."""
    with chunked_llm() as chunked:
        chunk = chunked.register_chunk(random_ids(12, 1))
        good = {"context_chunk_ids": [chunk.id], "query": [5]}
        too_long = {"context_chunk_ids": [chunk.id] * 8, "query": [5]}
        with pytest.raises(ValueError, match="max_model_len") as kept:
            chunked.batch_generate_from_chunks([good, good, too_long], PARAMS)
        assert kept.tb is not None
        assert chunked.llm_engine.get_num_unfinished_requests() == 0
        assert not chunked.delete_chunk(chunk.id).deferred


def test_an_answer_becomes_a_chunk_like_any_other() -> None:
    with chunked_llm() as chunked:
        context = chunked.register_chunk(random_ids(12, 1))
        output, chunk = chunked.generate_and_retain_output(
            None, [context.id], query=[9, 8], sampling_params=greedy(6, ignore_eos=True), name="answer"
        )
        assert chunk.chunk_type is ChunkType.OUTPUT
        eos = chunked.llm_engine.eos_token_ids
        assert list(chunk.token_ids) == [token for token in output.outputs[0].token_ids if token not in eos]
        kv = chunked.llm_engine.chunk_store.get(chunk.id)
        assert kv is not None
        wanted_k, wanted_v = reference_kv(TINY, [*chunk.context_token_ids, *chunk.token_ids])
        tolerances.check_kv(kv.k.flatten(2), wanted_k)
        tolerances.check_kv(kv.v.flatten(2), wanted_v)
        second = chunked.generate_from_chunks(None, [context.id, "answer"], query=[5], sampling_params=PARAMS)
        assert second.prompt_token_ids[12:-1] == list(chunk.token_ids)


def test_an_answer_that_is_cut_off_becomes_no_chunk() -> None:
    def fail(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        if len(token_ids) == 2:
            raise ValueError("no more")
        return logits

    with chunked_llm() as chunked:
        context = chunked.register_chunk(random_ids(12, 1))
        params = greedy(6, ignore_eos=True, logits_processors=[fail])
        with pytest.raises(RuntimeError, match="the answer is not retained"):
            chunked.generate_and_retain_output(None, [context.id], query=[9, 8], sampling_params=params)
        assert [info.chunk.id for info in chunked.list_chunks()] == [context.id]


def test_public_names() -> None:
    assert chunks.ChunkedLLM is ChunkedLLM
    assert chunks.__all__ == sorted(chunks.__all__) and set(chunks._LIVES_ABOVE) < set(chunks.__all__)
    assert [getattr(chunks, name).__name__ for name in chunks.__all__] == chunks.__all__
    with pytest.raises(AttributeError, match="no attribute 'Chunks'"):
        _ = chunks.Chunks
