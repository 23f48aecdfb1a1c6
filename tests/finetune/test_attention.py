"""What a training row computes is what the engine computes when it reuses the row's chunks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.blend.prompts import recomputed_positions, tiny_prompt
from tests.engine.engines import BLOCK_SIZE, DEMO, demo_prompt, engine, greedy, run, tiny_model
from vllm_blend.finetune.attention import FLEX, MODEL_TYPES, NAME, check_supported, register, reuse_arguments
from vllm_blend.finetune.masks import FULL, ISOLATED, MIXED, PARTLY, make_reuse

LIKELIEST = 5
TINY = {name: tiny_model(name) for name in MODEL_TYPES if name != "phi3"}
TINY["phi3"] = tiny_model("phi3", partial_rotary_factor=1.0)

pytestmark = pytest.mark.cpu_only


def trained(model: str) -> Any:
    register()
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation=NAME).eval()


def chunk_numbers(prompt: dict[str, Any]) -> torch.Tensor:
    """Return the chunk numbers of a prompt in token ids, as `Rows.chunks` has them."""
    numbers = [0] * len(prompt["prefix"])
    for number, chunk in enumerate(prompt["chunks"], 1):
        numbers += [number] * len(chunk)
    return torch.tensor([numbers + [-1] * len(prompt["suffix"])], dtype=torch.int16)


def last_logprobs(
    model: Any,
    prompt: dict[str, Any],
    kind: int,
    recomputed: Sequence[int] = (),
    whole: Sequence[int] = (),
    sinks: int | None = None,
) -> torch.Tensor:
    """Return the log-probabilities of the first answer token, by a whole-sequence forward. `whole` are numbers of
    chunks."""
    chunks = chunk_numbers(prompt)
    again = torch.zeros_like(chunks, dtype=torch.float32)
    again[0, list(recomputed)] = 1
    ids = torch.tensor([[*prompt["prefix"], *chain(*prompt["chunks"]), *prompt["suffix"]]])
    in_place = torch.isin(chunks, torch.tensor(whole, dtype=chunks.dtype))
    reuse = make_reuse(chunks, torch.tensor([kind]), again, len(recomputed), in_place, sinks)
    with torch.no_grad():
        logits: torch.Tensor = model(**reuse_arguments(model, ids, chunks, reuse), use_cache=False).logits
    return logits[0, ids.shape[1] - 1].log_softmax(-1)


def assert_same(output: Any, expected: torch.Tensor) -> None:
    given = output.outputs[0].logprobs[0]
    assert len(given) >= LIKELIEST
    for token, entry in given.items():
        assert abs(entry.logprob - expected[token].item()) < 2e-3
    assert max(given, key=lambda token: given[token].logprob) == expected.argmax().item()


def tokenized(llm: Any, prompt: dict[str, Any]) -> dict[str, Any]:
    tokenizer = llm.get_tokenizer()
    pieces = {key: tokenizer.encode(prompt[key], add_special_tokens=key == "prefix") for key in ("prefix", "suffix")}
    return {**pieces, "chunks": [tokenizer.encode(chunk, add_special_tokens=False) for chunk in prompt["chunks"]]}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_a_row_is_what_the_engine_blends(name: str, ratio: float) -> None:
    prompt = tiny_prompt()
    with engine(TINY[name], enable_blending=True, block_size=BLOCK_SIZE) as llm:
        asked = {**prompt, "blend_selector": "random", "blend_recompute_ratio": ratio}
        [output] = run(llm, asked, greedy(1, logprobs=LIKELIEST, ignore_eos=True))
        recomputed = recomputed_positions(llm, len(prompt["suffix"])).tolist()
    kind, chosen = {0.0: (ISOLATED, []), 1.0: (FULL, [])}.get(ratio, (PARTLY, recomputed))
    assert kind != PARTLY or len(chosen) > 10
    assert_same(output, last_logprobs(trained(TINY[name]), prompt, kind, chosen))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_mixed_row_is_what_the_engine_computes_when_it_computes_chunks_in_place(name: str) -> None:
    prompt = tiny_prompt()
    with engine(TINY[name], enable_blending=True, block_size=BLOCK_SIZE) as llm:
        asked = {**prompt, "blend_selector": "none", "in_place_chunks": [1, 2]}
        [output] = run(llm, asked, greedy(1, logprobs=LIKELIEST, ignore_eos=True))
    mixed = last_logprobs(trained(TINY[name]), prompt, MIXED, whole=[2, 3])
    assert_same(output, mixed)
    assert (mixed - last_logprobs(trained(TINY[name]), prompt, ISOLATED)).abs().max() > 0.01


def test_a_row_whose_chunks_see_bos_alone_is_what_the_engine_reuses_after_bos() -> None:
    prompt = tiny_prompt()
    with engine(TINY["llama"], enable_blending=True, block_size=BLOCK_SIZE, blend_encoding_context="bos") as llm:
        prompt["prefix"] = [llm.get_tokenizer().bos_token_id, *prompt["prefix"]]
        asked = {**prompt, "blend_selector": "none"}
        [output] = run(llm, asked, greedy(1, logprobs=LIKELIEST, ignore_eos=True))
    after_bos = last_logprobs(trained(TINY["llama"]), prompt, ISOLATED, sinks=1)
    assert_same(output, after_bos)
    assert (after_bos - last_logprobs(trained(TINY["llama"]), prompt, ISOLATED)).abs().max() > 0.01


def test_a_row_of_the_demo_model_is_what_the_engine_reuses() -> None:
    with engine(enable_blending=True) as llm:
        prompt = tokenized(llm, dict(demo_prompt(11, passages=6)))
        asked = {**prompt, "blend_selector": "random", "blend_recompute_ratio": 0.0}
        [output] = run(llm, asked, greedy(1, logprobs=LIKELIEST, ignore_eos=True))
    model = trained(DEMO)
    isolated = last_logprobs(model, prompt, ISOLATED, [])
    assert_same(output, isolated)
    full = last_logprobs(model, prompt, FULL, [])
    assert (full - isolated).abs().max() > 0.1  # reuse does change something


def test_a_full_row_is_the_model_as_it_is() -> None:
    prompt = tiny_prompt()
    ids = torch.tensor([[*prompt["prefix"], *chain(*prompt["chunks"]), *prompt["suffix"]]])
    for directory in TINY.values():
        stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.no_grad():
            expected = stock(input_ids=ids).logits[0, -1].log_softmax(-1)
        assert torch.allclose(last_logprobs(trained(directory), prompt, FULL, []), expected, atol=1e-4)
        everything = (chunk_numbers(prompt)[0] > 0).nonzero().flatten().tolist()
        assert torch.allclose(last_logprobs(trained(directory), prompt, PARTLY, everything), expected, atol=1e-4)


@pytest.mark.parametrize(
    "name, field, value, message",
    [
        ("qwen2", "model_type", "gemma", "model_type is 'gemma'"),
        ("qwen2", "use_sliding_window", True, "sliding_window is 20, and rows have up to 96"),
        ("mistral", "sliding_window", 95, "sliding_window is 95, and rows have up to 96"),
        ("phi3", "sliding_window", 95, "sliding_window is 95, and rows have up to 96"),
        (
            "phi3",
            "rope_parameters",
            {"rope_type": "default", "partial_rotary_factor": 0.75},
            "partial_rotary_factor is",
        ),
        ("qwen2", "rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4}, "rope_type 'dynamic'"),
    ],
)
def test_a_model_with_another_attention_is_refused(name: str, field: str, value: object, message: str) -> None:
    config = AutoConfig.from_pretrained(TINY[name])
    config.sliding_window = 20 if name == "qwen2" else 96
    check_supported(config, "here", 96)
    setattr(config, field, value)
    with pytest.raises(ValueError, match=f"here: .*{message}"):
        check_supported(config, "here", 96)


def test_flex_attention_computes_what_the_dense_mask_does() -> None:
    chunks = torch.tensor([[0] * 40 + [1] * 90 + [2] * 70 + [-1] * 56] * 4, dtype=torch.int16)
    ids = torch.randint(3, 200, chunks.shape, generator=torch.Generator().manual_seed(1))
    again = torch.zeros(chunks.shape)
    again[:, 60:90] = 1
    reuse = make_reuse(chunks, torch.tensor([FULL, ISOLATED, PARTLY, MIXED]), again, 32, chunks == 2, sinks=8)
    dense = trained(TINY["qwen3"])
    flexible = AutoModelForCausalLM.from_pretrained(TINY["qwen3"], dtype=torch.float32, attn_implementation=FLEX).eval()
    with torch.no_grad():
        one, other = (
            model(**reuse_arguments(model, ids, chunks, reuse), use_cache=False).logits for model in (dense, flexible)
        )
    torch.testing.assert_close(other[:, :256], one[:, :256], atol=2e-5, rtol=1e-4)
