"""The engine on a GPU: the same answers as a full prefill, as the CPU, as no graphs; and no waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.engine.compare import blend_of
from tests.tolerances import TOLERANCES
from vllm_blend import LLM, RequestOutput, SamplingParams
from vllm_blend.blend.selectors import SELECTORS
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample

pytestmark = pytest.mark.gpu

MODEL = "inputs/demo-model"
TOLERANCE = {dtype: tolerance.logprobs.largest for dtype, tolerance in TOLERANCES.items()}
GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=5)
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 4096, "max_num_seqs": 16, "blend_chunk_cache_gib": 0.5}


def prompts(count: int, **options: Any) -> list[Any]:
    samples = load_dataset("inputs/musique_s.json")[:count]
    return [build_qa_prompt(normalize_sample(s, i), "musique") | options for i, s in enumerate(samples)]


def first_difference(a: RequestOutput, b: RequestOutput) -> float:
    """Largest difference of the first token's log-probabilities, over tokens both report."""
    assert a.error is None and b.error is None
    left, right = a.outputs[0].logprobs, b.outputs[0].logprobs
    assert left is not None and right is not None
    shared = left[0].keys() & right[0].keys()
    assert shared
    return max(abs(left[0][token].logprob - right[0][token].logprob) for token in shared)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def blending(dtype: str) -> Iterator[LLM]:
    yield LLM(MODEL, device="cuda", dtype=dtype, enable_blending=True, **SMALL)
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def full(dtype: str) -> list[RequestOutput]:
    llm = LLM(MODEL, device="cuda", dtype=dtype, enable_prefix_caching=False, **SMALL)
    return llm.generate(prompts(6), GREEDY, use_tqdm=False)


def test_full_prefill_agrees_with_the_cpu(full: list[RequestOutput], dtype: str) -> None:
    cpu = LLM(MODEL, device="cpu", dtype="float32", max_num_seqs=16)
    for ours, expected in zip(full, cpu.generate(prompts(6), GREEDY, use_tqdm=False), strict=True):
        assert first_difference(ours, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("selector", sorted(set(SELECTORS) - {"none"}))
def test_ratio_one_is_full_prefill(selector: str, blending: LLM, full: list[RequestOutput], dtype: str) -> None:
    asked = prompts(6, blend_selector=selector, blend_recompute_ratio=1.0)
    for ours, expected in zip(blending.generate(asked, GREEDY, use_tqdm=False), full, strict=True):
        assert first_difference(ours, expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("selector", ["question_attention", "value_deviation", "first_tokens"])
def test_a_partial_blend_agrees_with_the_cpu(selector: str, blending: LLM, dtype: str) -> None:
    """The same number of tokens is recomputed. In bf16, near-ties choose others of equal worth, so texts may differ."""
    cpu = LLM(MODEL, device="cpu", dtype="float32", enable_blending=True, max_num_seqs=16)
    asked = prompts(6, blend_selector=selector, blend_recompute_ratio=0.3)
    pairs = list(
        zip(blending.generate(asked, GREEDY, use_tqdm=False), cpu.generate(asked, GREEDY, use_tqdm=False), strict=True)
    )
    assert [blend_of(a) for a, _ in pairs] == [blend_of(b) for _, b in pairs]
    if dtype == "float32":
        assert [a.outputs[0].text for a, _ in pairs] == [b.outputs[0].text for _, b in pairs]


def test_graphs_change_nothing() -> None:
    """Greedy decoding with and without CUDA graphs, batch sizes between buckets included."""
    texts = []
    for eager in (True, False):
        llm = LLM(MODEL, device="cuda", dtype="bfloat16", enforce_eager=eager, **SMALL)
        assert (llm.llm_engine.model_executor.driver_worker.model_runner.block_pass.decode_graphs is None) is eager
        texts.append([o.outputs[0].text for o in llm.generate(prompts(11), GREEDY, use_tqdm=False)])
    assert texts[0] == texts[1]


def test_penalties_follow_tokens_while_the_model_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps replayed as graphs and queued ahead give what steps give that are read one by one."""
    params = [
        SamplingParams(
            temperature=0.0 if i % 2 else 1.0,
            seed=None if i % 2 else i,
            max_tokens=40 + i,
            ignore_eos=True,
            repetition_penalty=(1.05, 1.0, 1.6)[i % 3],
            frequency_penalty=0.4 * (i % 4 == 1),
            presence_penalty=0.5 * (i % 5 == 1),
            bad_words=["the", "of the", "in the city"] if i % 4 > 1 else [],
        )
        for i in range(11)
    ]
    answers = []
    for ahead in (False, True):
        llm = LLM(MODEL, device="cuda", dtype="bfloat16", async_scheduling=ahead, **SMALL)
        scheduler = llm.llm_engine.scheduler
        schedule, num_ahead = scheduler.schedule, list[bool]()

        def counting(ahead: bool = False, schedule: Any = schedule, num_ahead: list[bool] = num_ahead) -> Any:
            num_ahead.append(ahead)
            return schedule(ahead)

        monkeypatch.setattr(scheduler, "schedule", counting)
        answers.append([o.outputs[0].token_ids for o in llm.generate(prompts(11), params, use_tqdm=False)])
        assert (sum(num_ahead) > 40) is ahead
    assert answers[0] == answers[1]


def test_pages_that_the_kernels_do_not_take(caplog: pytest.LogCaptureFixture) -> None:
    """An error where the kernels were forced, plain torch and a warning where they were not."""
    arguments: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "block_size": 8, **SMALL}
    with pytest.raises(ValueError, match=r"'cuda': block_size=8, but .* 16 tokens and more; raise block_size"):
        LLM(MODEL, attention_backend="cuda", **arguments)
    llm = LLM(MODEL, **arguments)
    assert "plain torch: block_size=8" in caplog.text
    [output] = llm.generate(prompts(1), SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    assert output.error is None


@contextmanager
def no_hidden_waiting() -> Iterator[None]:
    """Whatever makes the host wait for the device raises RuntimeError, but for waiting for an event."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("selector", ["question_attention", "value_deviation", None])
def test_the_host_waits_for_the_device_only_to_read_its_tokens(selector: str | None) -> None:
    """Prefilling, blending by either kind of rule, decoding; greedy and random tokens, with log-probabilities;
    penalties and bad words, whose draws wait until the tokens before them are read."""
    llm = LLM(MODEL, device="cuda", dtype="bfloat16", enable_blending=selector is not None, **SMALL)
    options: dict[str, Any] = {} if selector is None else {"blend_selector": selector, "blend_recompute_ratio": 0.15}
    params = [
        SamplingParams(temperature=0, max_tokens=4),
        SamplingParams(seed=1, top_p=0.9, top_k=50, max_tokens=4, logprobs=2),
        SamplingParams(
            temperature=0, repetition_penalty=1.05, presence_penalty=0.1, bad_words=["a", "of the"], max_tokens=4
        ),
    ]
    llm.generate(prompts(3, **options), params, use_tqdm=False)  # the chunks are stored, everything lazy is done
    with no_hidden_waiting():
        with pytest.raises(RuntimeError, match="synchronizing"):
            torch.ones(1, device="cuda").item()
        outputs = llm.generate(prompts(3, **options), params, use_tqdm=False)
    assert all(output.error is None and len(output.outputs[0].token_ids) > 0 for output in outputs)
