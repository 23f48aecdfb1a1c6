"""What a session counts and compares is what the engine computed: token-layers by hand, distributions by others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.quality.small import MODEL, small_samples
from vllm_blend import LLM, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, normalize_sample
from vllm_blend.quality.forced import kl_divergence
from vllm_blend.quality.probe import Probe
from vllm_blend.quality.questions import joined_ids
from vllm_blend.quality.session import Answer, Session, Truth

LAYERS, HIDDEN, MLP, QKV = 12, 384, 768, 384 + 2 * 128
SHARE = HIDDEN * QKV / (HIDDEN * QKV + HIDDEN * HIDDEN + 3 * HIDDEN * MLP)  # of a layer's weights, Q, K and V
RULES = (
    {"blend_selector": "none"},
    {"blend_selector": "question_attention", "blend_recompute_ratio": 0.1},
    {"blend_selector": "random", "blend_recompute_ratio": 0.3},
)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(MODEL, batch=2, blend_encoding_context="page") as session:
        yield session


@pytest.fixture(scope="module")
def prompts() -> list[Any]:
    return [build_qa_prompt(normalize_sample(raw), "musique") for raw in small_samples()]


@pytest.fixture(scope="module")
def plain(session: Session, prompts: list[Any]) -> list[Any]:
    return [{"prompt_token_ids": joined_ids(session.engine, prompt)} for prompt in prompts]


@pytest.fixture(scope="module")
def truths(session: Session, plain: list[Any]) -> list[Truth]:
    return session.truths(plain, 24)


def test_the_plain_prompt_has_the_text_of_the_chunked_one(session: Session) -> None:
    """Chat templates end a turn after the question: the token that does is not text there, as it is in a passage."""
    engine = session.engine
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    end = tokenizer.eos_token
    prompt: Any = {"prefix": "Answer.\n\n", "chunks": ["One.\n\n", "Two.\n\n"], "suffix": f"Three?{end}\nAnswer:"}
    ids = joined_ids(engine, prompt)
    assert ids == engine.parse("".join([prompt["prefix"], *prompt["chunks"], prompt["suffix"]])).token_ids
    assert tokenizer.eos_token_id in ids and ids == engine.parse(prompt).token_ids


def whole(tokens: int, layers: int = LAYERS) -> float:
    """Token-layers of a prefill that draws one token: the last layer does the rest for its last row only."""
    return tokens * (layers - 1 + SHARE) + 1 - SHARE


def lengths(session: Session, prompt: Any) -> tuple[int, int, int, int]:
    """Tokens of the prompt, its suffix, its prefix and its first chunk."""
    prefix, pieces = session.engine.identify_chunks(prompt["prefix"], [*prompt["chunks"], prompt["suffix"]])
    sizes = [len(piece.token_ids) for piece in pieces]
    assert prefix is not None
    return len(prefix.token_ids) + sum(sizes), sizes[-1], len(prefix.token_ids), sizes[0]


def test_every_token_layer_counts_once(session: Session, prompts: list[Any]) -> None:
    prompt = prompts[0]
    total, suffix, prefix, chunk = lengths(session, prompt)
    assert session.encode([prompt]) == pytest.approx((total - suffix) * (LAYERS - 1 + SHARE))
    assert session.encode([prompt]) == 0
    free = total - suffix - prefix - chunk  # prefix and first chunk are exact where they stand
    chosen = math.floor(0.2 * (total - suffix) + 1e-9)

    def cost(**settings: Any) -> float:
        session.answer([prompt | settings], 1)
        return session.token_layers

    session.answer([{"prompt_token_ids": joined_ids(session.engine, prompt)}], 1)
    assert session.token_layers == pytest.approx(whole(total))
    assert cost(blend_selector="none") == pytest.approx(whole(suffix))
    assert cost(blend_selector="full") == pytest.approx(whole(free + suffix))
    assert cost(blend_selector="first_tokens", blend_recompute_ratio=0.2) == pytest.approx(whole(chosen + suffix))
    looking = suffix * (8 + SHARE)  # nine of the layers, and of the last one only Q, K and V
    asked = cost(blend_selector="question_attention", blend_recompute_ratio=0.2)
    assert asked == pytest.approx(whole(chosen + suffix) + looking)
    dropped = (free - chosen) * (1 + SHARE)  # layer 0 is computed whole, and Q, K and V of layer 1
    compared = cost(blend_selector="value_deviation", blend_recompute_ratio=0.2)
    assert compared == pytest.approx(whole(chosen + suffix) + dropped)


def test_tokens_after_the_first_do_not_count(session: Session, prompts: list[Any], truths: list[Truth]) -> None:
    batch = [prompt | {"blend_selector": "random", "blend_recompute_ratio": 0.1} for prompt in prompts]
    session.encode(prompts)
    assert any(len(answer.token_ids) > 2 for answer in session.answer(batch, 24))
    long = session.token_layers
    session.follow(batch, truths, batch=3)
    forced = session.token_layers
    session.answer(batch, 1)
    assert session.token_layers == pytest.approx(long) and session.token_layers == pytest.approx(forced)


def test_full_prefills_distributions_are_those_of_transformers(truths: list[Truth], plain: list[Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for truth, prompt in zip(truths, plain, strict=True):
        ids, answer = prompt["prompt_token_ids"], list(truth.answer.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([ids + answer[:-1]])).logits[0, len(ids) - 1 :]
        expected = logits.log_softmax(-1)
        torch.testing.assert_close(torch.stack(truth.log_probs), expected, atol=1e-4, rtol=1e-4)
        assert expected.argmax(-1).tolist() == answer  # greedy, and its end is among its tokens


def test_full_prefill_follows_itself(session: Session, plain: list[Any], truths: list[Truth]) -> None:
    for following, truth in zip(session.follow(plain, truths, batch=1), truths, strict=True):
        assert following.agrees and len(following.kl) == len(truth.answer.token_ids) and max(following.kl) < 1e-8


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["blend_selector"])
def test_a_prompt_agrees_if_its_free_answer_is_the_same(
    session: Session, prompts: list[Any], truths: list[Truth], rule: dict[str, Any]
) -> None:
    blended = [prompt | rule for prompt in prompts]
    session.encode(prompts)
    free = session.answer(blended, 24)
    found = session.follow(blended, truths)
    same = [answer == truth.answer for answer, truth in zip(free, truths, strict=True)]
    assert [following.agrees for following in found] == same


def test_plain_reuse_is_compared_at_every_token(session: Session, prompts: list[Any], truths: list[Truth]) -> None:
    """Plain reuse chooses nothing, so the answer so far may as well be a part of the question."""
    session.encode(prompts)
    found = session.follow([prompt | RULES[0] for prompt in prompts], truths)
    assert not all(following.agrees for following in found)
    llm = LLM(MODEL, enable_blending=True, blend_encoding_context="page")
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    for prompt, truth, following in zip(prompts, truths, found, strict=True):
        _, [suffix] = llm.llm_engine.identify_chunks([], [prompt["suffix"]])
        answer = truth.answer.token_ids
        for step, kl in enumerate(following.kl):
            asked = prompt | RULES[0] | {"suffix": [*suffix.token_ids, *answer[:step]]}
            [output] = llm.generate(asked, one, use_tqdm=False)
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            own = torch.tensor([logprobs[0][token].logprob for token in range(len(truth.log_probs[step]))])
            expected = torch.nn.functional.kl_div(own, truth.log_probs[step], log_target=True, reduction="sum")
            assert kl == pytest.approx(float(expected), rel=1e-3, abs=1e-5)


def test_the_choice_sees_the_question_alone(session: Session, prompts: list[Any], truths: list[Truth]) -> None:
    """The first token of a forced answer is drawn from what the free answer's is, whatever is forced."""
    blended = [prompt | RULES[1] | {"blend_recompute_ratio": 0.02} for prompt in prompts]
    session.encode(prompts)
    others = [Truth(Answer("", (5, *t.answer.token_ids)), (t.log_probs[0], *t.log_probs)) for t in truths]
    forced = [following.kl[0] for following in session.follow(blended, others)]
    free = session.truths(blended, 1)
    expected = [float(kl_divergence(t.log_probs[0], own.log_probs[0])) for t, own in zip(truths, free, strict=True)]
    assert forced == pytest.approx(expected, rel=1e-4, abs=1e-9) and max(expected) > 1e-5


def test_chunks_are_encoded_in_the_company_asked_for(session: Session, prompts: list[Any]) -> None:
    reuse = [prompt | RULES[0] for prompt in prompts[:1]]
    found = {}
    for company in ("page", "bos", "filler"):
        session.use_company(company)
        session.encode(prompts[:1])
        found[company] = session.truths(reuse, 1)[0].log_probs[0]
        llm = LLM(MODEL, enable_blending=True, blend_encoding_context=company)
        [output] = llm.generate(reuse, SamplingParams(temperature=0, max_tokens=1, logprobs=0), use_tqdm=False)
        assert output.outputs[0].logprobs is not None
        [(token, likeliest)] = output.outputs[0].logprobs[0].items()
        assert float(found[company][token]) == pytest.approx(likeliest.logprob, abs=1e-4)
    session.use_company("page")
    assert len({round(float(row.max()), 3) for row in found.values()}) == 3


def test_what_cannot_be_answered_is_an_error(session: Session, prompts: list[Any]) -> None:
    with pytest.raises(ValueError, match="no_such_rule"):
        session.answer([prompts[0], prompts[1] | {"blend_selector": "no_such_rule"}], 1)
    assert len(session.answer(prompts[:1], 1)) == 1  # the first of them is not left behind
    with pytest.raises(ValueError, match="batch"):
        Session(MODEL, batch=0)


def test_what_memory_does_not_hold_is_an_error(prompts: list[Any]) -> None:
    with Session(MODEL, batch=3, blend_chunk_cache_gib=1e-4, block_size=8, num_gpu_blocks_override=129) as small:
        assert small.num_held(200) == 0
        with pytest.raises(RuntimeError, match="raise blend_chunk_cache_gib"):
            small.encode(prompts[:2])
        ids = [joined_ids(small.engine, prompt) for prompt in prompts]
        # 42 full blocks each, of 128: together they fit at first, and with another token each they do not.
        with pytest.raises(RuntimeError, match="smaller batch"):
            small.answer([{"prompt_token_ids": (one * 4)[: 42 * 8]} for one in ids], 24)


def test_new_chunks_fit_beside_those_that_were_used_more_often(session: Session, prompts: list[Any]) -> None:
    """The store holds two prompts of three, and prefers to keep what has been used most."""
    tokens = sum(len(joined_ids(session.engine, prompt)) for prompt in prompts[:2])
    gib = tokens * session.engine.composer.bytes_per_token / 2**30
    with Session(MODEL, batch=1, blend_chunk_cache_gib=gib, blend_encoding_context="page") as small:
        for _ in range(20):
            small.encode(prompts[:2])
        assert small.encode(prompts[2:]) > 0 and small.encode(prompts[2:]) == 0


def test_a_model_of_other_layers_is_refused() -> None:
    model: Any = nn.Module()
    model.lm_head = nn.Linear(2, 2)
    model.model = nn.Module()
    layer: Any = nn.Module()
    layer.self_attn = nn.Module()
    model.model.layers = nn.ModuleList([layer])
    with pytest.raises(ValueError, match="layer 0 of Module is not built of"):
        Probe(model)
