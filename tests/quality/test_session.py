"""What a session counts and reads is what the engine computed: token-layers by hand, logits by `logprobs`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.quality.small import MODEL, small_samples
from vllm_blend import LLM, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, normalize_sample
from vllm_blend.quality.probe import Probe
from vllm_blend.quality.questions import joined_ids
from vllm_blend.quality.session import Session

LAYERS, HIDDEN, MLP, QKV = 12, 384, 768, 384 + 2 * 128
SHARE = HIDDEN * QKV / (HIDDEN * QKV + HIDDEN * HIDDEN + 3 * HIDDEN * MLP)  # of a layer's weights, Q, K and V


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(MODEL, batch=2) as session:
        yield session


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    return [build_qa_prompt(normalize_sample(raw), "musique") for raw in small_samples()]


def whole(tokens: int, layers: int = LAYERS) -> float:
    """Token-layers of a prefill that draws one token: the last layer does the rest for its last row only."""
    return tokens * (layers - 1 + SHARE) + 1 - SHARE


def lengths(session: Session, prompt: Any) -> tuple[int, int, int, int]:
    """Tokens of the prompt, its suffix, its prefix and its first chunk."""
    prefix, pieces = session.engine.identify_chunks(prompt["prefix"], [*prompt["chunks"], prompt["suffix"]])
    sizes = [len(piece.token_ids) for piece in pieces]
    assert prefix is not None
    return len(prefix.token_ids) + sum(sizes), sizes[-1], len(prefix.token_ids), sizes[0]


def test_chunks_are_encoded_apart(session: Session, prompts: list[Any]) -> None:
    first = session.answer([prompts[0] | {"blend_selector": "none"}], 1)
    total, suffix, _, _ = lengths(session, prompts[0])
    assert first.encoding == pytest.approx((total - suffix) * (LAYERS - 1 + SHARE))
    assert first.token_layers == pytest.approx(whole(suffix))
    assert session.answer([prompts[0] | {"blend_selector": "none"}], 1).encoding == 0


def test_every_token_layer_counts(session: Session, prompts: list[Any]) -> None:
    prompt = prompts[0]
    total, suffix, prefix, chunk = lengths(session, prompt)
    free = total - suffix - prefix - chunk  # prefix and first chunk are exact where they stand
    chosen = math.floor(0.2 * (total - suffix) + 1e-9)

    def cost(**settings: Any) -> float:
        return session.answer([prompt | settings], 1).token_layers

    in_full = session.answer([{"prompt_token_ids": joined_ids(session.engine, prompt)}], 1)
    assert in_full.token_layers == pytest.approx(whole(total)) and in_full.encoding == 0
    assert cost(blend_selector="full") == pytest.approx(whole(free + suffix))
    assert cost(blend_selector="first_tokens", blend_recompute_ratio=0.2) == pytest.approx(whole(chosen + suffix))
    looking = suffix * (8 + SHARE)  # nine of the layers, and of the last one only Q, K and V
    asked = cost(blend_selector="question_attention", blend_recompute_ratio=0.2)
    assert asked == pytest.approx(whole(chosen + suffix) + looking)
    dropped = (free - chosen) * (1 + SHARE)  # layer 0 is computed whole, and Q, K and V of layer 1
    compared = cost(blend_selector="value_deviation", blend_recompute_ratio=0.2)
    assert compared == pytest.approx(whole(chosen + suffix) + dropped)


def test_tokens_after_the_first_do_not_count(session: Session, prompts: list[Any]) -> None:
    batch = [prompt | {"blend_selector": "random", "blend_recompute_ratio": 0.1} for prompt in prompts]
    long = session.answer(batch, 24)
    short = session.answer(batch, 1)
    assert any(len(answer.token_ids) > 2 for answer in long.answers)
    assert long.token_layers == pytest.approx(short.token_layers)
    assert short.token_layers == pytest.approx(sum(session.answer([prompt], 1).token_layers for prompt in batch))


def test_answers_and_first_distributions_are_those_of_the_llm(session: Session, prompts: list[Any]) -> None:
    settings = {"blend_selector": "question_attention", "blend_recompute_ratio": 0.1}
    found = session.answer([prompt | settings for prompt in prompts], 24).answers
    llm = LLM(MODEL, enable_blending=True)
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"], logprobs=-1)
    for prompt, answer in zip(prompts, found, strict=True):
        [output] = llm.generate(prompt | settings, params, use_tqdm=False)
        [completion] = output.outputs
        assert answer.token_ids == tuple(completion.token_ids) and answer.text == completion.text.strip()
        assert completion.logprobs is not None
        expected = torch.tensor([completion.logprobs[0][token].logprob for token in range(len(answer.first))])
        torch.testing.assert_close(answer.first, expected, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_answered_is_an_error(session: Session, prompts: list[Any]) -> None:
    with pytest.raises(ValueError, match="no_such_rule"):
        session.answer([prompts[0], prompts[1] | {"blend_selector": "no_such_rule"}], 1)
    assert len(session.answer(prompts[:1], 1).answers) == 1  # the first of them is not left behind
    with pytest.raises(ValueError, match="batch"):
        Session(MODEL, batch=0)


def test_chunks_that_the_store_cannot_keep_are_an_error(prompts: list[Any]) -> None:
    with (
        Session(MODEL, batch=2, blend_chunk_cache_gib=1e-4) as small,
        pytest.raises(RuntimeError, match="raise blend_chunk_cache_gib"),
    ):
        small.answer(prompts[:2], 1)


def test_new_chunks_fit_beside_those_that_were_used_more_often(session: Session, prompts: list[Any]) -> None:
    """The store holds two prompts of three, and prefers to keep what has been used most."""
    plain = [prompt | {"blend_selector": "none"} for prompt in prompts]
    tokens = sum(len(joined_ids(session.engine, prompt)) for prompt in prompts[:2])
    gib = tokens * session.engine.composer.bytes_per_token / 2**30
    with Session(MODEL, batch=1, blend_chunk_cache_gib=gib) as small:
        for _ in range(20):
            small.answer(plain[:2], 1)
        assert small.answer(plain[:2], 1).encoding == 0
        found = small.answer(plain[2:], 4)
    expected = session.answer(plain[2:], 4)
    assert [one.token_ids for one in found.answers] == [one.token_ids for one in expected.answers]
    assert found.token_layers == pytest.approx(expected.token_layers) and found.encoding > 0


def test_prompts_that_are_computed_twice_are_an_error(prompts: list[Any]) -> None:
    with (
        Session(MODEL, batch=3, block_size=8, num_gpu_blocks_override=129) as small,
        pytest.raises(RuntimeError, match="smaller batch"),
    ):
        ids = [joined_ids(small.engine, prompt) for prompt in prompts]
        # 42 full blocks each, of 128: together they fit at first, and with another token each they do not.
        small.answer([{"prompt_token_ids": (one * 4)[: 42 * 8]} for one in ids], 24)


def test_a_model_of_other_layers_is_refused() -> None:
    model: Any = nn.Module()
    model.lm_head = nn.Linear(2, 2)
    model.model = nn.Module()
    layer: Any = nn.Module()
    layer.self_attn = nn.Module()
    model.model.layers = nn.ModuleList([layer])
    with pytest.raises(ValueError, match="layer 0 of Module is not built of"):
        Probe(model)
