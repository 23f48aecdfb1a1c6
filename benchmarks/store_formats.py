"""Measure what a disk store in fp8 or int8 costs in answers and saves in bytes: `python -m benchmarks.store_formats`.

For every format one engine computes the chunks of all questions and stores them; another one, with nothing in memory,
answers from that store, greedily. It has to find every chunk there: a chunk that it computes again ends the run. Shares
of bytes are relative to the same KV as bfloat16; `of payload` counts the layers alone, the other one the segments on
the disk, where a chunk takes whole pages. F1 and exact match are percentages; `F1 loss` is the format's loss against
the exact store, with the standard error of the mean difference by question.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers import BLENDS
from vllm_blend import LLM, SamplingParams
from vllm_blend.kv_store.serialization import ChunkHeader
from vllm_blend.kv_store.tiered import TieredChunkStore
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.evaluate import best_score, exact_match, f1_score, first_line
from vllm_blend.pipeline.prompts import prompt_for

ROOT = Path(__file__).resolve().parents[1]
FORMATS = ("auto", "fp8", "int8")
BATCH = 8  # prompts at once: a chunk that waits behind many others for the disk is taken for late, and computed


@dataclass(frozen=True)
class Answers:
    """The answers of one format and method, by question."""

    texts: list[str]
    exact: list[float]
    f1: list[float]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = [str(ROOT / "inputs" / name) for name in ("musique_s.json", "wikimqa_s.json")]
    parser.add_argument("--datasets", nargs="*", default=data)
    parser.add_argument("--model", default=str(ROOT / "inputs" / "demo-model"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, help="questions of each data set (default: all)")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args(argv)
    lines = [f"{date.today()}, {args.dtype}, torch {torch.__version__}, model {Path(args.model).name}"]
    for path in args.datasets:
        samples = [normalize_sample(raw, index) for index, raw in enumerate(load_dataset(path))][: args.limit]
        lines += ["", f"{Path(path).stem}, {len(samples)} questions", ""]
        lines += [
            "| format | of payload | on the disk | method | exact match | F1 | F1 loss | same answer |",
            "|---|---|---|---|---|---|---|---|",
        ]
        lines += table(args.model, args.dtype, path, samples)
    print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


def table(model: str, dtype: str, dataset: str, samples: Sequence[Sample]) -> list[str]:
    rows: list[str] = []
    expected: dict[str, Answers] = {}
    for how in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            common = {"dtype": dtype, "chunk_store_path": folder, "chunk_store_gib": 8, "chunk_store_format": how}
            payload, disk = fill(model, dataset, samples, common)
            found = answer_all(model, dataset, samples, common)
        expected = expected or found
        for method, answers in found.items():
            rows.append(row(how, payload, disk, method, answers, expected[method]))
            print(rows[-1], flush=True)
    return rows


def row(how: str, payload: float, disk: float, method: str, found: Answers, expected: Answers) -> str:
    cells = [how, f"{payload:.1%}", f"{disk:.1%}", method]
    cells += [f"{100 * statistics.fmean(found.exact):.1f}", f"{100 * statistics.fmean(found.f1):.1f}"]
    if found is expected:
        return f"| {' | '.join([*cells, '', ''])} |"
    losses = [100 * (a - b) for a, b in zip(expected.f1, found.f1, strict=True)]
    error = statistics.stdev(losses) / math.sqrt(len(losses)) if len(losses) > 1 else math.nan
    same = statistics.fmean(a == b for a, b in zip(found.texts, expected.texts, strict=True))
    return f"| {' | '.join([*cells, f'{statistics.fmean(losses):.2f} +- {error:.2f}', f'{same:.0%}'])} |"


def engine(model: str, common: dict[str, Any]) -> tuple[LLM, TieredChunkStore]:
    llm = LLM(model, enable_blending=True, blend_chunk_cache_gib=4, enable_prefix_caching=False, **common)
    store = llm.llm_engine.chunk_store
    assert store.below
    return llm, store


def fill(model: str, dataset: str, samples: Sequence[Sample], common: dict[str, Any]) -> tuple[float, float]:
    """Store the chunks of all questions; return their layers' bytes, and those of the segments, as shares of
    bfloat16."""
    llm, store = engine(model, common)
    for sample in samples:
        prompt = build_qa_prompt(sample, dataset)
        llm.encode_chunks(prompt["prefix"], prompt["chunks"])
        if not store.flush(120):
            raise RuntimeError("the disk did not take the chunks in time")
    disk: Any = store.below[0].storage
    entries = disk.space.index.live()
    if len(entries) != llm.llm_engine.composer.num_encoded:
        raise RuntimeError(f"{len(entries)} chunks are on the disk, of {llm.llm_engine.composer.num_encoded}")
    tokens = payload = 0
    for entry in entries:
        layout = ChunkHeader.decode(entry.header, entry.key, disk.config.model).layout
        tokens += layout.num_tokens
        payload += layout.num_layers * layout.layer_bytes
    worker = llm.llm_engine.model_executor.driver_worker
    plain = tokens * worker.num_layers * 2 * worker.shape.kv_heads * worker.shape.head_dim * torch.bfloat16.itemsize
    shares = payload / plain, disk.num_bytes / plain
    store.close()
    return shares


def answer_all(model: str, dataset: str, samples: Sequence[Sample], common: dict[str, Any]) -> dict[str, Answers]:
    llm, store = engine(model, common)
    found = {}
    for method, settings in BLENDS.items():
        prompts: list[Any] = [build_qa_prompt(sample, dataset) | settings for sample in samples]
        params = SamplingParams(temperature=0, max_tokens=prompt_for(dataset).max_tokens, stop=["\n"])
        batches = [prompts[start : start + BATCH] for start in range(0, len(prompts), BATCH)]
        outputs = [output for batch in batches for output in llm.generate(batch, params, use_tqdm=False)]
        texts = [first_line(output.outputs[0].text) for output in outputs]
        pairs = list(zip(texts, (list(sample.answers) for sample in samples), strict=True))
        exact, f1 = ([best_score(score, *pair) for pair in pairs] for score in (exact_match, f1_score))
        found[method] = Answers(texts, exact, f1)
    if llm.llm_engine.composer.num_encoded:
        raise RuntimeError(f"{llm.llm_engine.composer.num_encoded} chunks were computed again")
    store.close()
    return found


if __name__ == "__main__":
    main()
