"""Batch inference over a Ray dataset: engines in actors, each fed with batches of rows.

    import ray
    from vllm_blend.ray import generate

    rows = ray.data.read_parquet("questions/")        # with columns prefix, chunks and suffix, or prompt
    answers = generate(rows, {"model": "Qwen/Qwen3-8B", "enable_blending": True}, {"max_tokens": 64}, concurrency=4)
    answers.write_parquet("answers/")                 # Ray Data shows the progress meanwhile

Rows with the same passages meet the same stored KV if the engines share a store (`chunk_store_path` or
`chunk_store_url`), and in one engine in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_blend.checks import require
from vllm_blend.engine_args import EngineArgs
from vllm_blend.features.kv_events.config import KVEventsConfig
from vllm_blend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from ray.data import Dataset

PIECES = ("prefix", "chunks", "suffix")
OUTPUTS = ("generated_text", "finish_reason", "prompt_tokens", "cached_tokens", "generated_tokens")


class Generator:
    """Answers batches of rows. An actor of Ray Data has one, and with it an engine."""

    def __init__(self, engine: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
        """Load the model. Raises the errors of `LLM` and of `SamplingParams`."""
        from vllm_blend import LLM

        self._llm = LLM(**engine)
        self._params = SamplingParams(**sampling)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch of columns with those of `OUTPUTS` added. Raises the errors of `LLM.generate`."""
        prompts = [prompt_of(row) for row in _rows(batch)]
        outputs = self._llm.generate(prompts, self._params, use_tqdm=False)
        values = {
            "generated_text": [output.outputs[0].text for output in outputs],
            "finish_reason": [output.outputs[0].finish_reason for output in outputs],
            "prompt_tokens": [len(output.prompt_token_ids) for output in outputs],
            "cached_tokens": [output.num_cached_tokens or 0 for output in outputs],
            "generated_tokens": [len(output.outputs[0].token_ids) for output in outputs],
        }
        return {**batch, **values}


def generate(
    dataset: Dataset,
    engine: Mapping[str, Any],
    sampling: Mapping[str, Any] | None = None,
    *,
    concurrency: int = 1,
    batch_size: int = 64,
    num_cpus: float = 1.0,
    num_gpus: float = 0.0,
) -> Dataset:
    """Return the dataset with an answer for each row. Nothing runs until it is read, as always with Ray Data.

    A row has its prompt in the columns `prefix`, `chunks` (a list) and `suffix`, or in `prompt`: text, or a list of
    token ids. `engine` are the keywords of `LLM`, `sampling` those of `SamplingParams`; `concurrency` is the number of
    engines, each of which gets `num_cpus` and `num_gpus`. Raises ValueError or TypeError that names the option, or the
    columns, before anything runs.
    """
    for name, value in (("concurrency", concurrency), ("batch_size", batch_size)):
        require(type(value) is int and value >= 1, f"{name}={value!r} must be an integer of at least 1")
    config = EngineArgs(**engine).create_engine_config()  # what is wrong with it is said here, not by an actor
    config.feature(KVEventsConfig).check_engines("concurrency", concurrency)
    params = SamplingParams(**(sampling or {}))
    require(params.n == 1, f"n={params.n}: a row has one answer; repeat the row instead")
    columns = dataset.columns() or []
    _check_columns(columns)
    return dataset.map_batches(
        Generator,
        fn_constructor_args=(dict(engine), dict(sampling or {})),
        batch_size=batch_size,
        batch_format="numpy",
        concurrency=concurrency,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
    )


def prompt_of(row: Mapping[str, Any]) -> Any:
    """Return a row's prompt as `LLM.generate` takes it."""
    if "chunks" in row:
        chunks = [_plain(chunk) for chunk in row["chunks"]]
        return {"prefix": _plain(row["prefix"]), "chunks": chunks, "suffix": _plain(row["suffix"])}
    return _plain(row["prompt"])


def _check_columns(columns: list[str]) -> None:
    if "chunks" in columns:
        missing = [name for name in PIECES if name not in columns]
        require(not missing, f"the dataset has the column chunks, but not {' and '.join(missing)}: add it")
        require("prompt" not in columns, "the dataset has both chunks and prompt: drop one of these columns")
    else:
        require(
            "prompt" in columns, f"the dataset has no column prompt or chunks, but {', '.join(columns)}: rename one"
        )
    taken = [name for name in OUTPUTS if name in columns]
    require(not taken, f"the dataset has a column {', '.join(taken)} already, which answers are written to: rename it")


def _rows(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = [name for name in (*PIECES, "prompt") if name in batch]
    return [dict(zip(names, values, strict=True)) for values in zip(*(batch[name] for name in names), strict=True)]


def _plain(value: Any) -> Any:
    """Return a string, or token ids as a list of int; NumPy has arrays and scalars."""
    return value if isinstance(value, str) else [int(each) for each in value]
