"""Every family with random options, on two or on four ranks: the answers of one process to the same random traffic."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.distributed.ranks import threaded_llm
from tests.engine.compare import assert_same_logprobs, blend_of
from tests.engine.engines import BLOCK_SIZE, assert_empty, engine, pages_for, run, threads, tiny_model
from tests.engine.test_traffic import LIBRARY, PREFIXES, RULES, SIZE, SUFFIXES, params_of, prompt_of, serve
from tests.models.tiny import ARCHITECTURES, FAMILIES
from vllm_blend.features.cascade import passes as cascade_passes

pytestmark = pytest.mark.cpu_only
MODELS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in (*ARCHITECTURES, *FAMILIES)]
MODELS.append(("mistral", {"sliding_window": 20}))
# What decides which answers are right.
BLENDING: dict[str, list[Any]] = {
    "blend_encoding_context": ["page", "prefix", "bos", "filler(1)"],
    "blend_check_layers": [[1], [2]],
    "blend_min_tokens": [0, 30],
}
# What must change no answer.
SERVING: dict[str, list[Any]] = {
    "async_scheduling": [True, False],
    "attention_backend": ["cpu", "torch_native"],
    "blend_chunk_cache_gib": [6 * SIZE / 2**20, 12 * SIZE / 2**20],
    "cascade_attention": [True, False],
    "enable_prefix_caching": [True, False],
    "max_num_batched_tokens": [9, 16, 40],
    "num_gpu_blocks_override": [pages_for(n)["num_gpu_blocks_override"] for n in (104, 152)],
    "speculative_config": [{"method": name, "num_speculative_tokens": 3} for name in ("ngram", "suffix")],
}


def some_of(random: Random, options: dict[str, list[Any]]) -> dict[str, Any]:
    return {name: random.choice(values) for name, values in options.items() if random.random() < 0.6}


def random_arrival(random: Random) -> tuple[Any, ...]:
    """Return a request of random traffic, as `ARRIVAL` of tests/engine/test_traffic.py describes it."""
    chunks = random.choices(range(len(LIBRARY)), k=random.randint(1, 3))
    return (
        random.randrange(16),
        random.choice([None, *RULES]),
        random.randrange(len(PREFIXES)),
        chunks,
        random.randrange(len(SUFFIXES)),
        random.choice([1, 2, 9, 20]),
        random.choice([None, 1, 2]),
        random.choice([None, None, None, 2, 6]),
    )


@pytest.mark.parametrize("seed", range(len(MODELS)))
def test_answers_are_those_of_one_process(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    architecture, overrides = MODELS[seed]
    model, size = tiny_model(architecture, **overrides), 2 + seed % 2 * 2
    options = {"enable_blending": True, "block_size": BLOCK_SIZE, **some_of(random, BLENDING)}
    serving = some_of(random, SERVING)
    if serving.get("attention_backend") == "torch_native":
        serving.pop("cascade_attention", None)  # which needs our kernels
    arrivals = [random_arrival(random) for _ in range(6)]
    monkeypatch.setattr(cascade_passes, "min_saved_tokens", lambda on_gpu: 1)  # for so few tokens it does not pay
    with threads(1), threaded_llm(model, size, **options, max_num_seqs=4, **serving) as llm:
        done = serve(llm, arrivals)
        assert_empty(llm)
    for index, (_, rule, prefix, chunks, suffix, max_tokens, draws, abort) in enumerate(arrivals):
        assert str(index) in done or abort is not None
        if str(index) in done:
            with engine(model, **options) as one:
                prompt = prompt_of(rule, prefix, tuple(chunks), suffix)
                [expected] = run(one, prompt, params_of(max_tokens, draws))
            assert_same_logprobs(done[str(index)], expected)
            assert blend_of(done[str(index)]) == blend_of(expected)
