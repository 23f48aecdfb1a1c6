"""Engines whose model is shared by two ranks: what rank 0 decides for both, feature by feature."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tests.blend.rules import KeyDeviation, selectors_restored
from tests.chunks.llms import TINY, new_chunked_llm, random_compositions
from tests.distributed.ranks import SeenFollower, rank_threads, threaded_llm
from tests.engine.compare import assert_same_logprobs, blend_of, chosen_by
from tests.engine.engines import (
    BLOCK_SIZE,
    DEMO,
    assert_empty,
    demo_prompt,
    engine,
    greedy,
    ids_of,
    new_llm,
    run,
    sampled,
    threads,
    tiny_model,
)
from tests.features.cascade.test_cascade import answers, cascades
from tests.features.spec_decode.engines import counts
from vllm_blend import LLM, SamplingParams, StructuredOutputsParams
from vllm_blend.blend.selectors import SELECTORS, Evidence, LooksAt, Selector, register_selector
from vllm_blend.distributed.ranks import Ranks
from vllm_blend.executor.multiproc import MultiProcExecutor
from vllm_blend.executor.worker_process import WorkerSettings
from vllm_blend.features.cascade import passes as cascade_passes

pytestmark = pytest.mark.cpu_only
DRAFTING = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
# Every rule, and what a look and a mean shift have to do with heads.
RULES = [
    *sorted(SELECTORS),
    "question_attention(first_layer=0, mean_shift=0)",
    "key_deviation(mean_shift=0.5)",
]
PARAMS = greedy(10, logprobs=2)


@pytest.fixture(scope="module")
def shared() -> Iterator[LLM]:
    """The demo model on two ranks."""
    with threads(1), threaded_llm(DEMO, 2, enable_blending=True, **DRAFTING) as llm:
        yield llm


@pytest.fixture
def two(shared: LLM) -> Iterator[LLM]:
    """The same as good as new."""
    shared.reset_prefix_cache()
    shared.llm_engine.chunk_store.clear()
    yield shared
    assert_empty(shared)


def asked(rule: str, ratio: float = 0.2) -> dict[str, Any]:
    kind = SELECTORS.get(rule)
    fixed = kind is not None and kind.fixed_ratio is not None
    return {"blend_selector": rule} | ({} if fixed else {"blend_recompute_ratio": ratio})


def test_every_rule_chooses_what_it_chooses_on_one_rank(two: LLM) -> None:
    prompts: list[Any] = [demo_prompt(index % 3, 4, **asked(rule)) for index, rule in enumerate(RULES)]
    with selectors_restored():
        register_selector(KeyDeviation)
        with engine(DEMO, enable_blending=True) as one:
            expected = run(one, prompts, PARAMS)
        found = run(two, prompts, PARAMS)
    for mine, theirs in zip(found, expected, strict=True):
        assert chosen_by(mine) == chosen_by(theirs)
        assert_same_logprobs(mine, theirs)
        assert blend_of(mine) == blend_of(theirs)


@pytest.mark.parametrize("rule", ["question_attention", "value_deviation"])
def test_a_blend_that_computes_everything_is_full_prefill(rule: str, two: LLM) -> None:
    blended = run(two, demo_prompt(0, 4, **asked(rule, 1.0)), PARAMS)[0]
    plain = run(two, {"prompt_token_ids": ids_of(two, demo_prompt(0, 4))}, PARAMS)[0]
    assert blended.blend is not None and plain.blend is None
    assert_same_logprobs(blended, plain)


def test_chunks_are_stored_and_dropped_by_all_ranks(two: LLM) -> None:
    """Encoded once, found again, and gone from the other rank when they are gone here."""
    [other] = SeenFollower.all
    first, again = (run(two, demo_prompt(1, 4), PARAMS)[0] for _ in range(2))
    assert first.num_found_tokens.get("host", 0) == 0 < again.num_found_tokens["host"]
    assert_same_logprobs(first, again)
    assert other.num_chunks == len(two.llm_engine.chunk_store)
    two.llm_engine.chunk_store.clear()
    gc.collect()
    run(two, "Where is it?", greedy(2))  # the errands go with the next step
    assert other.num_chunks == 0
    assert other.num_requests == 1
    anew = run(two, demo_prompt(1, 4), PARAMS)[0]
    assert anew.num_found_tokens.get("host", 0) == 0
    assert_same_logprobs(first, anew)


def test_rank_0_draws_for_all(two: LLM) -> None:
    """Sampled, drafted, processed and constrained tokens, of several completions, and log-probabilities of prompts."""
    ids = ids_of(two, demo_prompt(2, 3))
    prompts = [{"prompt_token_ids": ids[:n]} for n in (40, 90, 31, 40, 120, 60)]

    def prefer_even(token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[1::2] -= 2.0
        return logits

    params: list[SamplingParams] = [
        greedy(30, logprobs=1),
        sampled(12, seed=3, n=2, logprobs=1, top_p=0.9),
        sampled(8, seed=5, repetition_penalty=1.3, logit_bias={7: 2.0}, logprobs=1),
        greedy(5, prompt_logprobs=2, logprobs=1),
        sampled(6, seed=1, logits_processors=[prefer_even], logprobs=1),
        greedy(12, structured_outputs=StructuredOutputsParams(choice=["Paris", "Rome", "somewhere else"]), logprobs=1),
    ]
    with engine(DEMO, enable_blending=True) as one:
        expected = run(one, prompts, params)
    outputs = run(two, prompts, params)
    for mine, theirs in zip(outputs, expected, strict=True):
        assert_same_logprobs(mine, theirs)
        assert (mine.prompt_logprobs is None) == (theirs.prompt_logprobs is None)
    prompt, wanted = outputs[3].prompt_logprobs, expected[3].prompt_logprobs
    assert prompt is not None and wanted is not None
    for position in range(1, 40):
        mine_, theirs_ = prompt[position], wanted[position]
        assert mine_ is not None and theirs_ is not None and mine_.keys() == theirs_.keys()
        assert all(abs(mine_[token].logprob - theirs_[token].logprob) < 1e-3 for token in mine_)
    assert outputs[5].outputs[0].text.strip() in ("Paris", "Rome", "somewhere else")
    assert counts(two)[1] > 0  # tokens were drafted


def test_steps_are_told_of_before_the_last_one_is_read() -> None:
    """Other ranks then feed what rank 0 has drawn, which its host does not know yet."""
    prompts = [{"prompt_token_ids": [3 + i, 5, 7 * i + 2]} for i in range(3)]
    params = [greedy(9, logprobs=1), sampled(7, seed=4, logprobs=1), sampled(8, seed=5, n=2, logprobs=1)]
    letters: dict[str, Any] = {"allowed_token_ids": list(range(39, 45)), "ignore_eos": True, "logprobs": 1}
    prompts += [{"prompt_token_ids": [39, 40, 41]}] * 2  # few tokens, which come again
    params += [
        greedy(20, repetition_penalty=1.3, bad_words=["EF", "FGH", "JE", "GEJ"], **letters),
        sampled(20, seed=6, presence_penalty=0.8, frequency_penalty=-0.3, **letters),
    ]
    with engine(TINY) as one:
        expected = run(one, prompts, params)
    with threads(1), threaded_llm(TINY, 2, async_scheduling=True) as llm:
        for mine, theirs in zip(run(llm, prompts, params), expected, strict=True):
            assert_same_logprobs(mine, theirs)
        assert SeenFollower.all[-1].num_ahead > 10


def test_a_selector_sees_the_heads_of_all_ranks_and_may_fail(two: LLM) -> None:
    """It is called on rank 0, by its name known only there."""
    seen: list[tuple[int, ...]] = []

    @dataclass(frozen=True)
    class Whole(Selector):
        name: ClassVar[str] = "whole_of_the_tests"
        looks_at: ClassVar[LooksAt] = LooksAt.LAYERS
        fails: bool = False

        def score(self, evidence: Evidence) -> torch.Tensor:
            deviation = evidence.v_deviation()
            if self.fails:
                raise RuntimeError("as told")
            assert evidence.v_new is not None and evidence.v_old is not None
            assert evidence.k_new is not None and evidence.k_old is not None
            seen.append(tuple(evidence.v_new.shape[1:]))
            own = (evidence.v_new - evidence.v_old).float().square().sum((1, 2))
            torch.testing.assert_close(own, deviation)
            torch.testing.assert_close((evidence.k_new - evidence.k_old).square().sum((1, 2)), evidence.k_deviation())
            return own

    with selectors_restored():
        register_selector(Whole)
        prompts: list[Any] = [
            demo_prompt(0, 4, **asked(Whole.name)),
            demo_prompt(1, 4, **asked(f"{Whole.name}(fails=true)")),
            demo_prompt(2, 4),
        ]
        own, failed, other = run(two, prompts, PARAMS)
    plain = run(two, demo_prompt(0, 4, **asked("value_deviation")), PARAMS)[0]
    assert chosen_by(own) == chosen_by(plain)
    assert failed.error is not None and "as told" in failed.error
    assert other.error is None
    config = two.llm_engine.hf_config
    assert seen == [(config.num_key_value_heads, config.hidden_size // config.num_attention_heads)]


def test_registered_chunks() -> None:
    params = greedy(6, logprobs=1, ignore_eos=True)
    with threads(1), rank_threads():
        shared, alone = new_chunked_llm(TINY, tensor_parallel_size=2), new_chunked_llm(TINY)
        outputs = []
        for chunked in (shared, alone):
            compositions = random_compositions(chunked, 10)
            outputs.append(chunked.batch_generate_from_chunks(compositions, params))
            assert_empty(chunked.llm)
            chunked.llm.shutdown()
    for mine, theirs in zip(*outputs, strict=True):
        assert mine.blend == theirs.blend
        assert_same_logprobs(mine, theirs)
    assert sum(output.blend is not None for output in outputs[0]) > 5


def test_every_rank_attends_shared_blocks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = new_chunked_llm(TINY)
    expected = answers(alone, selector="first_tokens")
    alone.llm.shutdown()
    monkeypatch.setattr(cascade_passes, "min_saved_tokens", lambda on_gpu: 1)  # for so few tokens it does not pay
    with threads(1), rank_threads(), cascades(monkeypatch) as seen:
        shared = new_chunked_llm(TINY, tensor_parallel_size=2, cascade_attention=True)
        outputs = answers(shared, selector="first_tokens")
        shared.llm.shutdown()
    for mine, theirs in zip(outputs, expected, strict=True):
        assert_same_logprobs(mine, theirs)
    assert seen and all(seen.count(step) % 2 == 0 for step in seen)


@pytest.mark.parametrize(
    "arguments",
    [
        {"quantization": "fp8"},
        {"chunk_store_path": "/tmp", "enable_blending": True},
        {"chunk_store_url": "redis://127.0.0.1:1", "enable_blending": True},
        {"blend_controller": True, "enable_blending": True},
        {"offload_mode": "exact", "enable_blending": True},
        {"enable_kvc": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_what_ranks_cannot_do_is_refused_by_name(arguments: dict[str, Any]) -> None:
    name = next(iter(arguments))
    with pytest.raises(ValueError, match=f"^{name}.* needs tensor_parallel_size=1, but it is 2: leave one"):
        LLM(TINY, tensor_parallel_size=2, **arguments)


def test_what_would_see_one_ranks_heads_is_refused_by_name(two: LLM) -> None:
    hooks = two.llm_engine.decoder.cache_fuse_metadata
    for hook in ("collect", "check"):
        hooks[hook] = True
        with pytest.raises(ValueError, match=rf"cache_fuse_metadata\['{hook}'\] needs tensor_parallel_size=1"):
            run(two, "Where is it?", PARAMS)
        hooks[hook] = False
    calls: dict[str, Any] = {
        "encode_chunks": lambda: two.encode_chunks("a", ["b"]),
        "load_chunk": lambda: two.load_chunk(None, None),  # type: ignore[arg-type]
        "apply_model": lambda: two.apply_model(id),
        "collective_rpc": lambda: two.collective_rpc("extension"),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"{name} needs tensor_parallel_size=1, but it is 2"):
            call()


def test_keys_of_chunks_name_the_rank_and_the_number_of_ranks(two: LLM) -> None:
    with engine(DEMO, enable_blending=True) as one:
        mine, theirs = two.llm_engine.fingerprint, one.llm_engine.fingerprint
    assert mine.weights == f"{theirs.weights}/rank 0 of 2"
    assert mine.digest != theirs.digest
    assert "float32 on cpu x 2, blends by" in repr(two)


def test_an_engine_that_is_dropped_ends_its_ranks() -> None:
    with threads(1), rank_threads():
        llm = LLM(TINY, tensor_parallel_size=2)
        assert any(thread.name == "rank 1" for thread in threading.enumerate())
        del llm
        gc.collect()


def test_an_engine_that_cannot_start_leaves_no_rank() -> None:
    with rank_threads(), pytest.raises(ValueError, match=r"room for .* tokens.*raise num_gpu_blocks_override"):
        LLM(TINY, tensor_parallel_size=2, block_size=BLOCK_SIZE, num_gpu_blocks_override=2)


def test_what_is_wrong_with_a_model_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 0 raises it, so the other ranks log no trace of it. Of a bug they do."""
    model, message = tiny_model("llama"), "the checkpoint has 3 layers"
    with rank_threads(), pytest.raises(ValueError, match=message):
        new_llm(model, tensor_parallel_size=2, hf_overrides={"num_hidden_layers": 9})
    assert not caplog.records
    with rank_threads(), pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="of a bug"):
        patch.setattr(WorkerSettings, "build", fail)
        new_llm(model, tensor_parallel_size=2)
    assert "rank 1 has failed" in caplog.text and "RuntimeError: of a bug" in caplog.text


def fail(settings: WorkerSettings, ranks: Ranks) -> None:
    raise RuntimeError("of a bug")


def test_ranks_that_cannot_share_a_model_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(MultiProcExecutor, "_start")
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3: .*num_attention_heads is 4, which 3 ranks cannot"):
        LLM(TINY, tensor_parallel_size=3)
