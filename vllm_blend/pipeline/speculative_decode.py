"""Stage 3: answer every question over the stored KV of its passages, and trace what each step did.

    python -m vllm_blend.pipeline.speculative_decode --load-cache-dir results/kv_caches

writes results/decoding/speculative_trace.json: {"schema_version", "config", "summary", "results"}. A result has the
prediction and its scores, times in seconds, what the blend reused, where each chunk came from, and `steps`. A step is
one step of the engine: {"step", "phase", "token_id", "text", "latency_ms", "accepted_drafts", "resident_chunks",
"promotions", "evictions", "bytes_moved", "proxy_scores"}. Its phase is "encode" while a chunk that was not stored is
computed (no token), "prefill" for the blend and the first token, then "decode". A step has one token, the last one, and
with speculative decoding the `accepted_drafts` before it.

The chunks that stage 2 marked for the GPU are there when decoding begins, the others on the CPU. Before every decode
step, chunks move: `promotions` and `evictions` name them, `bytes_moved` is what was copied, `resident_chunks` are those
that are whole on the GPU during the step, and `proxy_scores` are the predictor's scores of the chunks (null before it
has seen a step). A chunk that returns to the CPU moves no bytes, as its copy there is still valid. On a CPU engine, two
pools of memory stand for GPU and CPU. In mode "none" nothing moves, and these fields are null.

Schema version 1 had no accepted_drafts, no proxy_scores, and nothing moved.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from typing import Any, Literal

from tqdm.auto import tqdm

from vllm_blend.blend.selectors import make_selector
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine_args import EngineArgs
from vllm_blend.features.kv_compress.extension import KVCompression
from vllm_blend.features.offload.extension import ChunkOffload
from vllm_blend.outputs import BlendStats, RequestOutput
from vllm_blend.pipeline.build_kv_cache import make_retrieval_config, page_arguments, read_tokenizer
from vllm_blend.pipeline.chunk_cache import ChunkCache
from vllm_blend.pipeline.config import (
    DecodeConfig,
    RetrievalConfig,
    add_dataset_flags,
    add_section_flags,
    section_from_flags,
)
from vllm_blend.pipeline.evaluate import evaluate, format_table, score_prediction
from vllm_blend.pipeline.files import read_json, write_json
from vllm_blend.pipeline.stage_inputs import PassageChunk, StageInput, StageSample, page_predecessors, read_stage_input
from vllm_blend.pipeline.timeline import WITHOUT, draw_timeline, load_pyplot
from vllm_blend.sampling_params import SamplingParams

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Placements:
    """The device on which stage 2 wants each chunk: "gpu" or "cpu", by sample and chunk."""

    path: Path
    by_sample: dict[str, dict[str, str]]
    pages: bool = False  # whether the chunks were encoded with their pages

    @property
    def num_on_gpu(self) -> int:
        """Return the largest number of chunks of one sample that are marked for the GPU."""
        return max((sum(p == "gpu" for p in chunks.values()) for chunks in self.by_sample.values()), default=0)

    @classmethod
    def read(cls, directory: Path, dataset_name: str) -> Placements:
        """Read the newest summary of a data set in a KV cache directory. Raises FileNotFoundError that says how to make
        one."""
        found = sorted(directory.glob(f"{escape(dataset_name)}_kv_top*.json"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise FileNotFoundError(
                f"{directory} holds no {dataset_name}_kv_top<k>.json: run `bash scripts/build_kv_cache.sh` first, or "
                "name the folder that it wrote with --load-cache-dir"
            )
        data = read_json(found[-1], "summary of the KV caches")
        try:
            by_sample = {s["id"]: {c["chunk_id"]: c["placement"] for c in s["chunks"]} for s in data["samples"]}
            pages = bool(data.get("config", {}).get("pages", False))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{found[-1]} is not a summary of stage 2 ({error!r}): run that stage again") from error
        return cls(found[-1], by_sample, pages)


def speculative_decode(config: DecodeConfig, retrieval: RetrievalConfig) -> dict[str, Any]:
    """Answer all samples, one after the other; write and return the trace."""
    stage = read_stage_input(retrieval, config.retrieval_json, config.max_samples, read_tokenizer(config.model_id))
    placements = Placements.read(Path(config.load_cache_dir), stage.dataset_name)
    if placements.pages != config.pages:
        raise ValueError(
            f"pages={config.pages}, but {placements.path} was written with pages={placements.pages}: run both stages "
            "with the same"
        )
    if config.order == "free":
        stage.check_scores()
    if config.timeline:
        load_pyplot(WITHOUT)
    engine = LLMEngine.from_engine_args(_engine_args(config, placements))
    cache = ChunkCache(engine, Path(config.load_cache_dir), stage.asking.prefix, stage.prefix_id, config.pages)
    params = SamplingParams(temperature=0, max_tokens=config.max_tokens or stage.asking.max_tokens, stop=["\n"])
    results = []
    # disable=None: no bar where stderr is not a terminal
    for sample in (bar := tqdm(stage.samples, desc="decode", unit="sample", disable=None)):
        chunks = chosen_chunks(sample, config.passages)
        wanted = placements.by_sample.get(sample.sample.sample_id, {})
        results.append(_answer(sample, chunks, stage, engine, cache, params, wanted, config.order))
        bar.set_postfix(hits=f"{cache.num_hits}/{cache.counts.total()}")
    if all(result["error"] for result in results):
        raise ValueError(f"no sample could be answered; {results[0]['id']}: {results[0]['error']}")
    output = {
        "schema_version": SCHEMA_VERSION,
        "config": asdict(config),
        "dataset_name": stage.dataset_name,
        "source": str(stage.source),
        "asked_by": stage.asking.name,
        "kv_summary": str(placements.path),
        "model": asdict(engine.fingerprint),
        "summary": _summary(results, cache, engine),
        "results": results,
    }
    write_json(config.output, output)
    if config.timeline:
        draw_timeline(output, config.timeline_path)
    return output


def _engine_args(config: DecodeConfig, placements: Placements) -> EngineArgs:
    fixed = make_selector(config.blend_selector).fixed_ratio is not None  # as for "none" and "full"
    drafts = {"method": "suffix", "num_speculative_tokens": config.draft_tokens} if config.draft_tokens else None
    return EngineArgs(
        model=config.model_id,
        dtype=config.dtype,
        device=config.device,
        async_scheduling=False,  # the trace reads each step before the next one begins
        enable_blending=True,
        blend_selector=config.blend_selector,
        blend_recompute_ratio=None if fixed else config.blend_recompute_ratio,
        **page_arguments(config.pages),
        offload_mode=None if config.offload_mode == "none" else config.offload_mode,
        offload_predictor=config.offload_predictor,
        offload_resident_chunks=config.resident_chunks or max(1, placements.num_on_gpu),
        offload_bytes_per_step=config.bytes_per_step,
        speculative_config=drafts,
        enable_kvc=config.enable_kvc,
        target_compression_rate=config.target_compression_rate or None,
        max_cache_tokens=config.max_cache_tokens or None,
        kvc_metric=config.kvc_metric,
    )


def chosen_chunks(sample: StageSample, passages: str) -> tuple[PassageChunk, ...]:
    """Return a prompt's chunks, the retrieved ones or all, in the data set's order: neighbours lean on one another."""
    if passages == "all" or sample.retrieved is None:
        return sample.chunks
    return tuple(sorted(sample.retrieved, key=lambda chunk: chunk.position))


def _answer(
    sample: StageSample,
    chunks: Sequence[PassageChunk],
    stage: StageInput,
    engine: LLMEngine,
    cache: ChunkCache,
    params: SamplingParams,
    wanted: dict[str, str],
    order: Literal["given", "free"],
) -> dict[str, Any]:
    """Answer one sample and return its entry of the trace. `wanted` says where stage 2 wants each chunk."""
    view = sample.sample
    result: dict[str, Any] = {"id": view.sample_id, "question": view.question, "answers": list(view.answers)}
    result["kind"] = view.kind or "unknown"
    try:
        sources = cache.load(chunks)
        prompt = stage.asking.prompt(view, [chunk.passage for chunk in chunks])
        if cache.pages:
            prompt |= {
                "continues": page_predecessors(chunks),
                "encode_after": [chunk.text_before for chunk in chunks],
            }
        if order == "free":
            prompt |= {"order": order, "relevance": sample.relevance(chunks)}
        if engine.extension(ChunkOffload) is not None:
            prompt["chunk_ranking"] = _ranking(sample, chunks, wanted)
        engine.add_request(view.sample_id, prompt, params)
    except ValueError as error:  # too long for the model: only this sample fails
        scores = asdict(score_prediction("", result["answers"]))
        return result | {"error": str(error), "prediction": "", **scores, "steps": []}
    steps, final = _run(engine, [chunk.chunk_id for chunk in chunks])
    metrics, completion = final.metrics, final.outputs[0]
    assert metrics is not None
    return result | {
        "error": final.error,
        "prediction": completion.text,
        "finish_reason": completion.finish_reason,
        **asdict(score_prediction(completion.text, result["answers"])),
        "prompt_tokens": len(final.prompt_token_ids),
        "ttft_s": metrics.time_in_prefill,
        "arrival_to_first_token_s": metrics.first_token_latency,
        "blend": None if final.blend is None else _counts(final.blend),
        "chunks": [
            {"chunk_id": chunk.chunk_id, "source": source, "placement": wanted.get(chunk.chunk_id)}
            for chunk, source in zip(chunks, sources, strict=True)
        ],
        "steps": steps,
    }


def _counts(blend: BlendStats) -> dict[str, Any]:
    """Return the fields of a blend without the letter for every token, which nothing reads from a file."""
    return {name: value for name, value in asdict(blend).items() if name != "token_kinds"}


def _ranking(sample: StageSample, chunks: Sequence[PassageChunk], wanted: dict[str, str]) -> list[int]:
    """Return the numbers of a prompt's chunks: those that stage 2 wants on the GPU first, then as they were
    retrieved."""
    best = {chunk.chunk_id: rank for rank, chunk in enumerate(sample.best(len(sample.chunks)))}

    def order(index: int) -> tuple[bool, int, int]:
        name = chunks[index].chunk_id
        return wanted.get(name) != "gpu", best.get(name, len(best)), index

    return sorted(range(len(chunks)), key=order)


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
        step |= {"latency_ms": latency, "accepted_drafts": 0}
        if outputs:
            final = outputs[0]
            completion = final.outputs[0]
            if len(completion.token_ids) > tokens:
                # A stop string that began in an earlier step may take text back; the prediction is final.
                step.update(token_id=completion.token_ids[-1], text=completion.text[len(text) :])
            step["phase"] = "decode" if tokens else "prefill"
            step["accepted_drafts"] = max(0, len(completion.token_ids) - tokens - 1)
            tokens, text = len(completion.token_ids), completion.text
        steps.append(step | _moves(engine, chunk_ids if outputs else [], step["phase"] == "decode"))
    assert final is not None and final.finished
    return steps, final


def _moves(engine: LLMEngine, chunk_ids: list[str], decodes: bool) -> dict[str, Any]:
    """Return where the chunks `chunk_ids` of the running request were in the last step, and what had moved for it."""
    offload = engine.extension(ChunkOffload)
    nothing: list[str] | None = None if offload is None else []
    step: dict[str, Any] = {"resident_chunks": chunk_ids, "promotions": nothing, "evictions": nothing}
    step |= {"bytes_moved": None if offload is None else 0, "proxy_scores": None}
    if offload is None or not decodes or not chunk_ids:
        return step
    [report] = offload.reports.values()
    scores = report.scores
    return {
        "resident_chunks": [chunk_ids[index] for index in report.resident_chunks],
        "promotions": [chunk_ids[index] for index in report.promotions],
        "evictions": [chunk_ids[index] for index in report.evictions],
        "bytes_moved": offload.scheduler.bytes_moved,
        "proxy_scores": None if scores is None else dict(zip(chunk_ids, scores, strict=True)),
    }


def _summary(results: Sequence[dict[str, Any]], cache: ChunkCache, engine: LLMEngine) -> dict[str, Any]:
    answered = [result for result in results if not result["error"]]
    blends = [result["blend"] for result in answered if result["blend"]]
    prompt_tokens = sum(result["prompt_tokens"] for result in answered)
    decode_ms = [step["latency_ms"] for result in answered for step in result["steps"] if step["phase"] == "decode"]
    offload, compression = engine.extension(ChunkOffload), engine.extension(KVCompression)
    moved = [step for result in answered for step in result["steps"]] if offload is not None else None
    return {
        "samples": len(results),
        "failed": len(results) - len(answered),
        "scores": evaluate(results, ["kind"]),
        "chunks": {name: cache.counts[name] for name in ("loaded", "in_memory", "missing", "damaged", "foreign")},
        "chunks_encoded": engine.composer.num_encoded,
        "prompt_tokens": prompt_tokens,
        "recomputed_tokens": sum(blend["num_recomputed_tokens"] for blend in blends),
        "encoded_tokens": sum(blend["num_encoded_tokens"] for blend in blends),
        "reused_tokens": sum(blend["num_reused_tokens"] + blend["num_exact_tokens"] for blend in blends),
        "ttft_s_median": statistics.median(result["ttft_s"] for result in answered) if answered else None,
        "decode_step_ms_median": statistics.median(decode_ms) if decode_ms else None,
        "accepted_drafts": sum(step["accepted_drafts"] for result in answered for step in result["steps"]),
        "promotions": None if moved is None else sum(len(step["promotions"]) for step in moved),
        "evictions": None if moved is None else sum(len(step["evictions"]) for step in moved),
        "bytes_moved": None if moved is None else sum(step["bytes_moved"] for step in moved),
        "kvs_evicted": None if compression is None else compression.engine.num_evicted,
    }


def report(output: dict[str, Any], config: DecodeConfig) -> str:
    """Return what the stage did, as text."""
    s, chunks = output["summary"], output["summary"]["chunks"]
    lines = [
        format_table(s["scores"]),
        f"{s['samples']} questions ({s['failed']} failed), asked by {output['asked_by']}",
        f"chunks loaded {chunks['loaded']}, missing {chunks['missing']}, damaged {chunks['damaged']}, another model's "
        f"{chunks['foreign']}; computed again {s['chunks_encoded']}",
    ]
    if s["ttft_s_median"] is not None and s["prompt_tokens"]:
        share = 100 * s["recomputed_tokens"] / s["prompt_tokens"]
        step = s["decode_step_ms_median"]
        lines.append(
            f"median time from the first step to the first token {1000 * s['ttft_s_median']:.1f} ms"
            + (f", per further token {step:.1f} ms" if step is not None else "")
            + f"; {share:.0f}% of the prompt tokens recomputed"
        )
    if s["promotions"] is not None:
        lines.append(
            f"{s['promotions']} chunks promoted and {s['evictions']} evicted while decoding, "
            f"{s['bytes_moved'] / 2**20:.0f} MiB copied (mode {config.offload_mode})"
        )
    if s["kvs_evicted"] is not None:
        lines.append(f"{s['kvs_evicted']} KVs of single heads evicted ({config.kvc_metric})")
    if config.draft_tokens:
        lines.append(f"{s['accepted_drafts']} draft tokens accepted")
    written = [config.output, *([str(config.timeline_path)] if config.timeline else [])]
    return "\n".join([*lines, *(f"  {path}" for path in written)])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Answer questions over stored chunk KV; trace every engine step.")
    add_dataset_flags(parser)
    parser.add_argument("--top-k", type=int, help="k of the retrieval stage, to find its output")
    add_section_flags(parser, DecodeConfig)
    args = parser.parse_args(argv)
    config = section_from_flags(parser, args, "decode")
    try:
        output = speculative_decode(config, make_retrieval_config(args))
    except (ImportError, OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(report(output, config))


if __name__ == "__main__":
    main()
