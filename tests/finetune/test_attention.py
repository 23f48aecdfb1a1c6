"""What a training row computes is what the engine computes when it reuses the row's chunks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.blend.prompts import recomputed_positions, tiny_prompt
from tests.engine.engines import BLOCK_SIZE, DEMO, demo_prompt, engine, greedy, run, tiny_model
from vllm_blend.finetune.attention import NAME, check_supported, register, reuse_arguments
from vllm_blend.finetune.masks import FULL, ISOLATED, PARTLY, make_reuse

LIKELIEST = 5
TINY = {name: tiny_model(name) for name in ("llama", "qwen2", "qwen3")}

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


def last_logprobs(model: Any, prompt: dict[str, Any], kind: int, recomputed: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the first answer token, by a whole-sequence forward."""
    chunks = chunk_numbers(prompt)
    again = torch.zeros_like(chunks, dtype=torch.float32)
    again[0, recomputed] = 1
    ids = torch.tensor([[*prompt["prefix"], *chain(*prompt["chunks"]), *prompt["suffix"]]])
    reuse = make_reuse(chunks, torch.tensor([kind]), again, slots=len(recomputed))
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


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("model_type", "gemma", "model_type is 'gemma'"),
        ("use_sliding_window", True, "sliding window"),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4}, "rope_type 'dynamic'"),
    ],
)
def test_a_model_with_another_attention_is_refused(field: str, value: object, message: str) -> None:
    config = AutoConfig.from_pretrained(TINY["qwen2"])
    check_supported(config, "here")
    config.sliding_window = 20
    setattr(config, field, value)
    with pytest.raises(ValueError, match=f"here: .*{message}"):
        check_supported(config, "here")
