"""Engines for tests of the metrics: one that says what it is told to, and a real one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from tests.blend.prompts import tiny_prompt
from tests.engine.engines import new_llm, tiny_model
from tests.engine.tiny_tokenizers import byte_level
from vllm_blend import LLM, SamplingParams
from vllm_blend.config import EngineConfig
from vllm_blend.engine.errors import EngineDeadError
from vllm_blend.engine.metrics import Metric
from vllm_blend.engine_args import EngineArgs


class Source:
    """Says what an engine would say. With `metrics` None, it is dead."""

    def __init__(self, metrics: Sequence[Metric] | None = ()) -> None:
        self.metrics = metrics
        self.num_calls = 0
        self.config: EngineConfig = EngineArgs(model="a-model").create_engine_config()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        return byte_level()

    async def check_health(self) -> None:
        if self.metrics is None:
            raise EngineDeadError("it is dead")

    async def get_metrics(self) -> list[Metric]:
        self.num_calls += 1
        return list(self.metrics or ())


def blending_llm(folder: Path, **arguments: Any) -> LLM:
    """Return an engine with a disk store that has answered one blended prompt twice."""
    llm = new_llm(tiny_model("llama"), enable_blending=True, chunk_store_path=str(folder), **arguments)
    for _ in range(2):
        llm.generate(tiny_prompt(), SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)  # type: ignore[arg-type]
    return llm
