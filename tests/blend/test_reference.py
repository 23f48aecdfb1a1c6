"""The engine against the plain reference: stored KV, chosen tokens, log-probabilities, answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch

from tests import tolerances
from tests.blend.prompts import recomputed_positions
from tests.blend.reference import Blended, BlendReference, Context, pad_suffix
from tests.blend.rules import KeyDeviation, selectors_restored
from tests.engine.compare import assert_greedy, assert_same_choice, check_entries
from tests.engine.engines import DEMO, demo_prompt, engine, greedy, hf_model, ids_of, run
from vllm_blend import LLM, register_selector
from vllm_blend.inputs import ChunkedPrompt

RULES = ["value_deviation", "key_deviation", "question_attention(mean_shift=0)", "first_tokens", "none"]
RATIO = 0.15
PROMPTS = [0, 7, 31, 77]


class CachingReference(BlendReference):
    """Rules reuse the same prompts: what the latest ones reuse is computed once."""

    def compose(self, prefix: list[int], chunks: Sequence[list[int]]) -> Context:
        return _composed(tuple(prefix), tuple(map(tuple, chunks)))


@lru_cache(maxsize=len(PROMPTS))
def _composed(prefix: tuple[int, ...], chunks: tuple[tuple[int, ...], ...]) -> Context:
    return BlendReference(hf_model(DEMO)).compose(list(prefix), list(map(list, chunks)))


@pytest.fixture(scope="module")
def reference() -> Iterator[BlendReference]:
    with selectors_restored():
        register_selector(KeyDeviation)
        yield CachingReference(hf_model(DEMO))
    _composed.cache_clear()


def pieces_of(llm: LLM, prompt: ChunkedPrompt) -> tuple[list[int], list[list[int]], list[int]]:
    """Token ids of the prefix with its BOS, of each chunk, and of the suffix."""
    tokenizer = llm.get_tokenizer()
    prefix, *rest = ([*tokenizer.encode(p, add_special_tokens=False)] for p in (prompt["prefix"], *prompt["chunks"]))
    suffix = tokenizer.encode(prompt["suffix"], add_special_tokens=False)
    return [tokenizer.bos_token_id, *prefix], rest, suffix


def projected(ids: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what k_proj and v_proj of transformers' model give for a text, per layer [tokens, kv_heads * head_dim]."""
    return _projected(tuple(ids))


@lru_cache(maxsize=16)  # engines of several settings store the same chunks
@torch.no_grad()
def _projected(ids: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    model = hf_model(DEMO)
    seen: list[dict[str, torch.Tensor]] = [{} for _ in model.model.layers]
    handles = []
    for layer, kept in zip(model.model.layers, seen, strict=True):
        for name in ("k_proj", "v_proj"):

            def keep(_: Any, __: Any, out: torch.Tensor, name: str = name, kept: dict[str, Any] = kept) -> None:
                kept[name] = out[0]

            handles.append(getattr(layer.self_attn, name).register_forward_hook(keep))
    try:
        model(torch.tensor([list(ids)]))
    finally:
        for handle in handles:
            handle.remove()
    return [(kept["k_proj"], kept["v_proj"]) for kept in seen]


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 40])
def test_stored_chunks_equal_an_independent_forward(max_num_batched_tokens: int) -> None:
    """K before RoPE and V of every layer: of the prefix, and of every chunk right after the prefix."""
    arguments: dict[str, Any] = {"max_num_batched_tokens": max_num_batched_tokens, "max_num_seqs": 8}
    with engine(enable_blending=True, **arguments) as llm:
        prompt = demo_prompt(3, passages=5)
        run(llm, prompt, greedy(1))
        prefix, chunks, _ = pieces_of(llm, prompt)
        prefix_id, chunk_ids = llm.llm_engine.identify_chunks(prompt["prefix"], prompt["chunks"])
        assert prefix_id is not None
        contexts = [[], *([prefix] * len(chunks))]
        for chunk_id, before, own in zip([prefix_id, *chunk_ids], contexts, [prefix, *chunks], strict=True):
            assert list(chunk_id.token_ids) == own
            stored = llm.llm_engine.chunk_store.get(chunk_id.key)
            assert stored is not None
            for layer, (k, v) in enumerate(projected([*before, *own])):
                tolerances.check_kv(stored.k[layer].flatten(1), k[len(before) :])
                tolerances.check_kv(stored.v[layer].flatten(1), v[len(before) :])


def assert_equal(
    llm: LLM, output: Any, reference: BlendReference, context: Context, suffix: list[int], rule: str
) -> None:
    """The same tokens chosen, the same answer, the same log-probabilities on the way."""
    budget = 0 if rule == "none" else int(RATIO * len(context.ids))
    chosen = recomputed_positions(llm, len(suffix)).cpu()
    blended = reference.blend(context, suffix, rule, budget, instead=chosen)
    assert_chosen(chosen, blended)
    completion = output.outputs[0]
    logprobs = reference.decode(blended, completion.token_ids)
    assert_greedy(completion.token_ids, logprobs)
    check_entries(completion.logprobs, completion.token_ids, logprobs)


def assert_chosen(chosen: torch.Tensor, blended: Blended) -> None:
    """The reference's own choice; in half precision, tokens about as strong may stand in for one another."""
    if assert_same_choice(chosen.tolist(), blended.chosen.tolist()):
        return
    ours, theirs = set(chosen.tolist()), set(blended.chosen.tolist())
    missed, instead = (blended.strengths[list(positions)] for positions in (theirs - ours, ours - theirs))
    tolerances.check_one("scores", (missed.max() - instead.min()).item())


@pytest.mark.parametrize("index", PROMPTS)
@pytest.mark.parametrize("rule", RULES)
def test_chunked_prompts(reference: BlendReference, rule: str, index: int) -> None:
    with engine(enable_blending=True) as llm:
        options: dict[str, Any] = {} if rule == "none" else {"blend_recompute_ratio": RATIO}
        prompt = demo_prompt(index, blend_selector=rule, **options)
        [output] = run(llm, prompt, greedy(6, logprobs=2))
        prefix, chunks, suffix = pieces_of(llm, prompt)
        assert output.prompt_token_ids == ids_of(llm, prompt)
        assert_equal(llm, output, reference, reference.compose(prefix, chunks), suffix, rule)


@pytest.mark.parametrize("index", PROMPTS[:2])
@pytest.mark.parametrize("rule", RULES)
def test_old_kvs(reference: BlendReference, rule: str, index: int) -> None:
    """KV that the user hands over: nothing of it is known to be exact, and it is one piece."""
    with engine() as llm:
        prompt = demo_prompt(index)
        prefix, chunks, suffix = pieces_of(llm, prompt)
        composed = reference.compose(prefix, chunks)
        n = len(composed.ids)
        context = Context(composed.ids, composed.kv, torch.arange(n), torch.ones(n, dtype=torch.bool))
        decoder = llm.llm_engine.decoder
        decoder.old_kvs = pad_suffix(composed.kv, len(suffix))
        decoder.cache_fuse_metadata.update(check=True, suffix_len=len(suffix), recomp_ratio=RATIO, selector=rule)
        [output] = run(llm, {"prompt_token_ids": [*composed.ids, *suffix]}, greedy(6, logprobs=2))
        assert_equal(llm, output, reference, context, suffix, rule)
