"""Stage 2: compute the KV of every passage once, and keep it in folders; the best k of a sample are meant for the GPU.

    python -m vllm_blend.pipeline.build_kv_cache --model-id inputs/demo-model

reads stage 1's output and writes a folder per chunk, results/kv_caches/<sample_chunk_id>/ (see kv_store/format.py), and
results/kv_caches/<dataset>_kv_top<k>.json: {"config", "model", "prefix", "summary", "samples"}. Each chunk is listed
with its folder, key, tokens, rank (of the retrieval, from 0; null if it was not retrieved) and placement: "gpu" for the
best k, "cpu" for the placeholders that may be promoted while decoding.

A chunk is encoded after the data set's instruction, as the engine encodes it for a prompt; with `pages` also after the
passages that precede it on its page. Running the stage again
computes only what is missing, damaged or another model's.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine.setup import load_tokenizer
from vllm_blend.engine_args import EngineArgs
from vllm_blend.kv_store.format import ChunkMiss, load_chunk, logger, write_chunk
from vllm_blend.kv_store.keys import ChunkId
from vllm_blend.pipeline.chunk_cache import MOST_NAMED
from vllm_blend.pipeline.config import (
    PrefillConfig,
    RetrievalConfig,
    add_dataset_flags,
    add_section_flags,
    dataset_settings,
    load_config,
    make_section,
    section_from_flags,
)
from vllm_blend.pipeline.files import write_json
from vllm_blend.pipeline.stage_inputs import PassageChunk, StageInput, StageSample, read_stage_input

BATCH = 32  # chunks encoded together: enough to fill a step, few enough to lose little when interrupted


@dataclass(frozen=True)
class _ChunkFolder:
    """A chunk folder of this data set."""

    name: str
    id: ChunkId
    text: str  # empty for the prefix
    text_before: str = ""  # what it is encoded after, besides the prefix


def build_kv_cache(config: PrefillConfig, retrieval: RetrievalConfig) -> dict[str, Any]:
    """Compute what is missing and write it; write and return the summary. Prints nothing but progress."""
    stage = read_stage_input(retrieval, config.retrieval_json, config.max_samples, read_tokenizer(config.model_id))
    common: dict[str, Any] = {"model": config.model_id, "dtype": config.dtype, "device": config.device}
    engine = LLMEngine.from_engine_args(EngineArgs(**common, enable_blending=True, **page_arguments(config.pages)))
    directory = Path(config.output_dir)
    started = time.perf_counter()
    entries, too_long = _entries(stage, engine, config.pages)
    missing = _missing(entries.values(), directory, engine)
    check_space(directory, sum(len(entries[name].id.token_ids) for name in missing), engine)
    written = _compute(missing, entries, stage, directory, engine)
    summary = {
        "samples": len(stage.samples),
        "chunks": len(entries) + len(too_long),
        "distinct_chunks": len({entry.id.key for entry in entries.values()}),
        "computed": len(missing),
        "reused": len(entries) - len(missing),
        "recomputed_damaged": sum(kind == "damaged" for kind in missing.values()),
        "recomputed_foreign": sum(kind == "foreign" for kind in missing.values()),
        "too_long": len(too_long),
        "tokens": sum(len(entry.id.token_ids) for entry in entries.values()),
        "bytes_written": written,
        "seconds": time.perf_counter() - started,
    }
    output = {
        "config": asdict(config),
        "dataset_name": stage.dataset_name,
        "source": str(stage.source),
        "asked_by": stage.asking.name,
        "model": asdict(engine.fingerprint),
        "prefix": _describe(entries[stage.prefix_id]) if stage.prefix_id in entries else None,
        "summary": summary,
        "samples": [_describe_sample(s, entries, config.top_k_gpu) for s in stage.samples],
    }
    write_json(config.summary_path(stage.dataset_name), output)
    return output


def read_tokenizer(model: str) -> PreTrainedTokenizerBase | None:
    """Return a model's tokenizer, whose chat template says how questions are asked, before the model is loaded."""
    return load_tokenizer(EngineArgs(model=model).create_engine_config().model)


def page_arguments(pages: bool) -> dict[str, Any]:
    """Return the engine's arguments for chunks that are encoded after what precedes them on their pages, or after the
    instruction alone. Either way it does not depend on the prompt, so the KV of a chunk is the same in all prompts."""
    return {"blend_encoding_context": "given" if pages else "prefix"}


def check_space(directory: Path, tokens: int, engine: LLMEngine) -> None:
    """Say how much the KV of so many tokens will take. Raises ValueError if the disk has less."""
    needed = tokens * engine.composer.bytes_per_token
    whole = directory.absolute()
    free = shutil.disk_usage(next(each for each in (whole, *whole.parents) if each.exists())).free
    dtype = str(engine.model_executor.driver_worker.dtype).removeprefix("torch.")
    size = f"the KV of {tokens} tokens in {dtype} takes {needed / 2**30:.2f} GiB"
    if needed > free:
        raise ValueError(
            f"{size}, and {directory} has room for {free / 2**30:.2f}: name another --output-dir, take fewer questions "
            "with --max-samples, or halve it with --dtype bfloat16 if that is float32"
        )
    if tokens:
        logger.info("%s in %s, which has room for %.2f GiB", size, directory, free / 2**30)


def _entries(stage: StageInput, engine: LLMEngine, pages: bool) -> tuple[dict[str, _ChunkFolder], list[str]]:
    """Return the folders of the samples' chunks and of the prefix, by name, and the chunks that no prompt can hold."""
    entries: dict[str, _ChunkFolder] = {}
    too_long: list[str] = []
    seen: set[str] = set()
    for sample in stage.samples:
        # A search of the whole corpus may have found chunks of other samples.
        chunks = [chunk for chunk in (*sample.chunks, *(sample.retrieved or ())) if chunk.chunk_id not in seen]
        seen.update(chunk.chunk_id for chunk in chunks)
        texts, before = [chunk.text for chunk in chunks], [chunk.text_before if pages else "" for chunk in chunks]
        prefix, ids = engine.identify_chunks(stage.asking.prefix, texts, encode_after=before)
        if prefix is not None:
            entries.setdefault(stage.prefix_id, _ChunkFolder(stage.prefix_id, prefix, ""))
        room = engine.max_model_len - (len(prefix.token_ids) if prefix is not None else 0)
        if room <= 0:
            raise ValueError(
                f"the instruction has {engine.max_model_len - room} tokens, and max_model_len is "
                f"{engine.max_model_len}: no passage has a place after it; shorten the instruction"
            )
        for chunk, chunk_id, text_before in zip(chunks, ids, before, strict=True):
            if len(chunk_id.token_ids) > room:
                too_long.append(chunk.chunk_id)
                logger.warning(
                    "%s has %d tokens, but max_model_len leaves %d after the instruction: left out",
                    chunk.chunk_id,
                    len(chunk_id.token_ids),
                    room,
                )
            else:
                entries[chunk.chunk_id] = _ChunkFolder(chunk.chunk_id, chunk_id, chunk.text, text_before)
    return entries, too_long


def _missing(entries: Iterable[_ChunkFolder], directory: Path, engine: LLMEngine) -> dict[str, str]:
    """Return the names of the folders that have to be written, each with what is wrong with it."""
    missing: dict[str, str] = {}
    found = Counter[str]()
    for entry in tqdm(list(entries), desc="check stored chunks", unit="chunk", disable=None):
        try:
            load_chunk(directory / entry.name, entry.id, engine.fingerprint)
        except ChunkMiss as miss:
            missing[entry.name] = miss.kind
            found[miss.kind] += 1
            if miss.kind != "missing" and found[miss.kind] <= MOST_NAMED:  # all are missing in a first run
                logger.warning("stored chunk not used, it will be computed again: %s", miss)
    for kind, what in (("damaged", "are damaged"), ("foreign", "are another model's, or another chunk's,")):
        if found[kind] > MOST_NAMED:
            logger.warning("%d more stored chunks %s and will be computed again", found[kind] - MOST_NAMED, what)
    return missing


def _compute(
    missing: dict[str, str], entries: dict[str, _ChunkFolder], stage: StageInput, directory: Path, engine: LLMEngine
) -> int:
    """Encode and write the missing chunks, equal contents once; return the bytes written."""
    by_key: dict[str, list[_ChunkFolder]] = {}
    for name in missing:
        by_key.setdefault(entries[name].id.key, []).append(entries[name])
    folders = list(by_key.values())
    written = 0
    with tqdm(total=len(missing), desc="compute chunk KV", unit="chunk", disable=None) as bar:
        for start in range(0, len(folders), BATCH):
            batch = folders[start : start + BATCH]
            chunks = [same[0] for same in batch if same[0].text]
            before = [entry.text_before for entry in chunks]
            kvs = engine.encode_chunks(stage.asking.prefix, [entry.text for entry in chunks], encode_after=before)
            computed = {entry.id.key: kv for entry, kv in zip(chunks, kvs, strict=True)}
            for same in batch:
                if not same[0].text:  # the prefix is a chunk with nothing before it
                    computed[same[0].id.key] = engine.encode_chunks([], [same[0].id.token_ids])[0]
                for entry in same:
                    kv = computed[entry.id.key]
                    written += write_chunk(directory / entry.name, entry.id, kv, engine.fingerprint)
                    bar.set_postfix_str(f"{written / 2**20:.0f} MiB", refresh=False)
                    bar.update()
    return written


def _describe(entry: _ChunkFolder) -> dict[str, Any]:
    return {"folder": entry.name, "key": entry.id.key, "tokens": len(entry.id.token_ids)}


def _describe_sample(sample: StageSample, entries: dict[str, _ChunkFolder], top_k: int) -> dict[str, Any]:
    ranks = {chunk.chunk_id: rank for rank, chunk in enumerate(sample.retrieved or ())}
    on_gpu = {chunk.chunk_id for chunk in sample.best(top_k)}
    chunks: dict[str, PassageChunk] = {chunk.chunk_id: chunk for chunk in (*sample.chunks, *(sample.retrieved or ()))}
    return {
        "id": sample.sample.sample_id,
        "chunks": [
            {
                "chunk_id": name,
                **_describe(entries[name]),
                "rank": ranks.get(name),
                "placement": "gpu" if name in on_gpu else "cpu",
            }
            for name in chunks
            if name in entries
        ],
        "too_long": [name for name in chunks if name not in entries],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compute and store the KV cache of every passage of a data set.")
    add_dataset_flags(parser)
    parser.add_argument("--top-k", type=int, help="k of the retrieval stage, and chunks of a sample for the GPU")
    add_section_flags(parser, PrefillConfig)
    args = parser.parse_args(argv)
    config = section_from_flags(parser, args, "prefill")
    try:
        retrieval = make_retrieval_config(args)
        if args.top_k is not None and not hasattr(args, "top_k_gpu"):
            config = replace(config, top_k_gpu=args.top_k)
        output = build_kv_cache(config, retrieval)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(report(output, config))


def make_retrieval_config(args: argparse.Namespace) -> RetrievalConfig:
    """Return the retrieval section, which says where that stage's output is and how questions are asked: a
    configuration file's, with a stage's flags over it."""
    values = dataset_settings(load_config(getattr(args, "config", None))["retrieval"], args)
    return make_section(RetrievalConfig, "retrieval", values if args.top_k is None else values | {"top_k": args.top_k})


def report(output: dict[str, Any], config: PrefillConfig) -> str:
    """Return what the stage did, as text."""
    s = output["summary"]
    again = f", {s['recomputed_damaged']} of them damaged" if s["recomputed_damaged"] else ""
    again += f", {s['recomputed_foreign']} of them another model's" if s["recomputed_foreign"] else ""
    return (
        f"{s['chunks']} chunks ({s['tokens']} tokens): {s['computed']} computed{again}, {s['reused']} found, "
        f"{s['too_long']} too long; {s['bytes_written'] / 2**20:.0f} MiB in {s['seconds']:.1f} s\n"
        f"  {config.summary_path(output['dataset_name'])}\n  {Path(config.output_dir)}/<sample_chunk_id>/"
    )


if __name__ == "__main__":
    main()
