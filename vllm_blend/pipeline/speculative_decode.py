"""Stage 3: answer every question over the stored KV of its passages, one real token per engine step, and trace it.

    python -m vllm_blend.pipeline.speculative_decode --load-cache-dir results/kv_caches

writes results/decoding/speculative_trace.json: {"schema_version", "config", "summary", "results"}. A result has the
prediction and its scores, times in seconds, what the blend reused, where each chunk came from, and `steps`. A step is
one step of the engine: {"step", "phase", "token_id", "text", "latency_ms", "resident_chunks", "promotions",
"evictions", "bytes_moved"}. Its phase is "encode" while a chunk that was not stored is computed (no token), "prefill"
for the blend and the first token, then "decode". `resident_chunks` are those whose KV the request has in its pages
after the step.

In schema version 1 nothing moves while a question is answered: promotions, evictions and bytes_moved are null.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vllm_blend.blend.selectors import make_selector
from vllm_blend.engine.arg_utils import EngineArgs
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.outputs import RequestOutput
from vllm_blend.pipeline.build_kv_cache import retrieval_of
from vllm_blend.pipeline.chunk_cache import ChunkCache
from vllm_blend.pipeline.config import DecodeConfig, RetrievalConfig, add_section_flags, section_from_flags
from vllm_blend.pipeline.evaluate import evaluate, format_table, score_prediction
from vllm_blend.pipeline.files import read_json, write_json
from vllm_blend.pipeline.stage_inputs import Chunk, StageInput, StageSample, read_stage_input
from vllm_blend.sampling_params import SamplingParams

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Placements:
    """Where stage 2 wants each chunk: "gpu" or "cpu", by sample and chunk."""

    path: Path
    by_sample: dict[str, dict[str, str]]

    @classmethod
    def read(cls, directory: Path, dataset_name: str) -> Placements:
        """The newest summary of a data set in a KV cache directory. FileNotFoundError says how to make one."""
        found = sorted(directory.glob(f"{dataset_name}_kv_top*.json"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise FileNotFoundError(
                f"{directory} holds no {dataset_name}_kv_top<k>.json: run `bash scripts/build_kv_cache.sh` first, or "
                "name the folder that it wrote with --load-cache-dir"
            )
        data = read_json(found[-1], "summary of the KV caches")
        try:
            by_sample = {s["id"]: {c["chunk_id"]: c["placement"] for c in s["chunks"]} for s in data["samples"]}
        except (TypeError, KeyError) as error:
            raise ValueError(f"{found[-1]} is not a summary of stage 2 ({error!r}): run that stage again") from error
        return cls(found[-1], by_sample)


def speculative_decode(config: DecodeConfig, retrieval: RetrievalConfig) -> dict[str, Any]:
    """Answer all samples, one after the other, and write and return the trace."""
    stage = read_stage_input(retrieval, config.retrieval_json, config.max_samples)
    placements = Placements.read(Path(config.load_cache_dir), stage.dataset_name)
    fixed = make_selector(config.blend_selector).fixed_ratio is not None  # "none" and "full" leave no choice
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=config.model_id,
            dtype=config.dtype,
            device=config.device,
            enable_blending=True,
            blend_selector=config.blend_selector,
            blend_recompute_ratio=None if fixed else config.blend_recompute_ratio,
        )
    )
    cache = ChunkCache(engine, Path(config.load_cache_dir), stage.style.instruction, stage.prefix_id)
    params = SamplingParams(temperature=0, max_tokens=config.max_tokens or stage.style.max_tokens, stop=["\n"])
    results = []
    for sample in tqdm(stage.samples, desc="decode", unit="sample"):
        chunks = chosen_chunks(sample, config.passages)
        results.append(_answer(sample, chunks, stage, engine, cache, params, placements))
    if all(result["error"] for result in results):
        raise ValueError(f"no sample could be answered; {results[0]['id']}: {results[0]['error']}")
    output = {
        "schema_version": SCHEMA_VERSION,
        "config": asdict(config),
        "dataset_name": stage.dataset_name,
        "source": str(stage.source),
        "kv_summary": str(placements.path),
        "model": asdict(engine.fingerprint),
        "summary": _summary(results, cache, engine),
        "results": results,
    }
    write_json(config.output, output)
    return output


def chosen_chunks(sample: StageSample, passages: str) -> tuple[Chunk, ...]:
    """A prompt's chunks, the retrieved ones or all, in the data set's order: neighbours lean on one another."""
    if passages == "all" or sample.retrieved is None:
        return sample.chunks
    return tuple(sorted(sample.retrieved, key=lambda chunk: chunk.position))


def _answer(
    sample: StageSample,
    chunks: Sequence[Chunk],
    stage: StageInput,
    engine: LLMEngine,
    cache: ChunkCache,
    params: SamplingParams,
    placements: Placements,
) -> dict[str, Any]:
    view = sample.sample
    wanted = placements.by_sample.get(view.sample_id, {})
    result: dict[str, Any] = {"id": view.sample_id, "question": view.question, "answers": list(view.answers)}
    result["kind"] = view.kind or "unknown"
    try:
        sources = cache.load(chunks)
        engine.add_request(
            view.sample_id,
            {
                "prefix": stage.style.instruction,
                "chunks": [chunk.text for chunk in chunks],
                "suffix": stage.style.suffix(view.question),
            },
            params,
        )
    except ValueError as error:  # too long for the model: it fails alone
        scores = asdict(score_prediction("", result["answers"]))
        return result | {"error": str(error), "prediction": "", **scores, "steps": []}
    steps, final = _run(engine, [chunk.chunk_id for chunk in chunks])
    metrics, completion = final.metrics, final.outputs[0]
    assert metrics is not None and metrics.first_token_time is not None and metrics.first_scheduled_time is not None
    return result | {
        "error": final.error,
        "prediction": completion.text,
        "finish_reason": completion.finish_reason,
        **asdict(score_prediction(completion.text, result["answers"])),
        "prompt_tokens": len(final.prompt_token_ids),
        "ttft_s": metrics.first_token_time - metrics.first_scheduled_time,
        "blend": asdict(final.blend) if final.blend is not None else None,
        "chunks": [
            {"chunk_id": chunk.chunk_id, "source": source, "placement": wanted.get(chunk.chunk_id)}
            for chunk, source in zip(chunks, sources, strict=True)
        ],
        "steps": steps,
    }


def _run(engine: LLMEngine, chunk_ids: list[str]) -> tuple[list[dict[str, Any]], RequestOutput]:
    """Step the engine until its only request is finished."""
    steps: list[dict[str, Any]] = []
    tokens, text = 0, ""
    final: RequestOutput | None = None
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        outputs = engine.step()
        latency = 1000 * (time.perf_counter() - started)
        step: dict[str, Any] = {"step": len(steps), "phase": "encode", "token_id": None, "text": ""}
        if outputs:
            final = outputs[0]
            completion = final.outputs[0]
            if len(completion.token_ids) > tokens:
                # A stop string that began in an earlier step may take text back; the prediction has the last word.
                step.update(token_id=completion.token_ids[-1], text=completion.text[len(text) :])
            step["phase"] = "decode" if tokens else "prefill"
            tokens, text = len(completion.token_ids), completion.text
        resident = chunk_ids if outputs else []
        step.update(latency_ms=latency, resident_chunks=resident, promotions=None, evictions=None, bytes_moved=None)
        steps.append(step)
    assert final is not None and final.finished
    return steps, final


def _summary(results: Sequence[dict[str, Any]], cache: ChunkCache, engine: LLMEngine) -> dict[str, Any]:
    answered = [result for result in results if not result["error"]]
    blends = [result["blend"] for result in answered if result["blend"]]
    prompt_tokens = sum(result["prompt_tokens"] for result in answered)
    decode_ms = [step["latency_ms"] for result in answered for step in result["steps"] if step["phase"] == "decode"]
    return {
        "samples": len(results),
        "failed": len(results) - len(answered),
        "scores": evaluate(results, ["kind"]),
        "chunks": {name: cache.counts[name] for name in ("loaded", "in_memory", "missing", "damaged", "foreign")},
        "chunks_encoded": engine.composer.num_encoded,
        "prompt_tokens": prompt_tokens,
        "recomputed_tokens": sum(blend["num_recomputed_tokens"] for blend in blends),
        "reused_tokens": sum(blend["num_reused_tokens"] + blend["num_exact_tokens"] for blend in blends),
        "ttft_s_median": statistics.median(result["ttft_s"] for result in answered) if answered else None,
        "decode_step_ms_median": statistics.median(decode_ms) if decode_ms else None,
    }


def report(output: dict[str, Any], config: DecodeConfig) -> str:
    """What the stage did, for people."""
    s, chunks = output["summary"], output["summary"]["chunks"]
    lines = [
        format_table(s["scores"]),
        f"{s['samples']} questions ({s['failed']} failed); chunks loaded {chunks['loaded']}, missing "
        f"{chunks['missing']}, damaged {chunks['damaged']}, another model's {chunks['foreign']}; computed again "
        f"{s['chunks_encoded']}",
    ]
    if s["ttft_s_median"] is not None and s["prompt_tokens"]:
        share = 100 * s["recomputed_tokens"] / s["prompt_tokens"]
        step = s["decode_step_ms_median"]
        lines.append(
            f"median time to first token {1000 * s['ttft_s_median']:.1f} ms"
            + (f", per further token {step:.1f} ms" if step is not None else "")
            + f"; {share:.0f}% of the prompt tokens recomputed"
        )
    return "\n".join([*lines, f"  {config.output}"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Answer questions over stored chunk KV; trace every engine step.")
    parser.add_argument("--dataset", help="data set file, as given to the retrieval stage")
    parser.add_argument("--top-k", type=int, help="k of the retrieval stage, to find its output")
    add_section_flags(parser, DecodeConfig)
    args = parser.parse_args(argv)
    config = section_from_flags(parser, args, "decode")
    try:
        output = speculative_decode(config, retrieval_of(getattr(args, "config", None), args.dataset, args.top_k))
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(report(output, config))


if __name__ == "__main__":
    main()
