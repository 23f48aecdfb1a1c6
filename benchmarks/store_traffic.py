"""Measure whether hits and time to first token stay stable as new queries keep coming, with a store far too small.

    python -m benchmarks.store_traffic --output traffic.json --plot traffic.png

Every query draws its passages by Zipf popularity from many documents; no two queries are alike. The disk has room for a
share of the documents' KV, the memory above it for a smaller one; chunks that neither has are computed, which counts in
the time to first token, as loading does. Each prompt is also prefilled in full, by an engine without any reuse, right
before or after: the gain is the ratio of the two times. Prints the first hundred queries (which begin with an empty
store), the second and the last hundred: a ratio of the last ones to earlier ones says whether gains decay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_blend import LLM, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample

FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
WINDOW = 100  # queries that a printed row sums up


@dataclass(frozen=True)
class Query:
    """The hits and times of one query; times are seconds to the first token."""

    chunks: int
    memory_hits: int
    disk_hits: int
    encoded: int
    blend: float
    full: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inputs/demo-model")
    parser.add_argument("--dataset", default="inputs/musique_s.json")
    parser.add_argument("--queries", type=int, default=1000)
    parser.add_argument("--documents", type=int, default=500)
    parser.add_argument("--passages", type=int, default=15, help="passages of a query")
    parser.add_argument("--zipf", type=float, default=1.0, help="popularity of the n-th document is n ** -zipf")
    parser.add_argument("--disk-share", type=float, default=0.3, help="share of the documents' KV that fits the disk")
    parser.add_argument("--memory-share", type=float, default=0.1)
    parser.add_argument("--selector", default="question_attention")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="every query, as JSON")
    parser.add_argument("--plot", type=Path, help="a picture; needs matplotlib")
    args = parser.parse_args(argv)

    plain = LLM(args.model, enable_prefix_caching=False)
    prefix, documents, questions = pieces(args.dataset, plain, args.documents)
    with tempfile.TemporaryDirectory() as folder:
        blending = tiered(args, folder, [len(document) for document in documents])
        queries = run(args, plain, blending, prefix, documents, questions)
        report(args, queries, blending)
    if args.output is not None:
        args.output.write_text(
            json.dumps({"settings": vars(args), "queries": [asdict(q) for q in queries]}, default=str)
        )
    if args.plot is not None:
        plot(queries, args.plot)


def pieces(dataset: str, llm: LLM, count: int) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Return token ids of the instruction, of `count` different passages and of the questions."""
    tokenizer = llm.get_tokenizer()

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    prompts = [
        build_qa_prompt(normalize_sample(sample, i), "musique") for i, sample in enumerate(load_dataset(dataset))
    ]
    texts = list(dict.fromkeys(chunk for prompt in prompts for chunk in prompt["chunks"]))
    if len(texts) < count:
        raise SystemExit(f"{dataset} has {len(texts)} different passages: lower --documents")
    prefix = [tokenizer.bos_token_id, *encode(str(prompts[0]["prefix"]))]
    return prefix, [encode(str(text)) for text in texts[:count]], [encode(str(prompt["suffix"])) for prompt in prompts]


def tiered(args: argparse.Namespace, folder: str, lengths: Sequence[int]) -> LLM:
    """Return an engine whose tiers have room for shares of the documents' KV, as it lies on the disk."""
    probe = LLM(args.model, enable_blending=True, num_gpu_blocks_override=1024)
    per_token = probe.llm_engine.composer.bytes_per_token
    gib = sum(lengths) * per_token / 2**30
    print(
        f"{len(lengths)} documents of {statistics.mean(lengths):.0f} tokens, {gib * 1024:.0f} MiB of KV; disk "
        f"{args.disk_share:.0%}, memory {args.memory_share:.0%}; {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )
    return LLM(
        args.model,
        enable_blending=True,
        enable_prefix_caching=False,
        blend_selector=args.selector,
        blend_recompute_ratio=args.ratio,
        blend_chunk_cache_gib=gib * args.memory_share,
        chunk_store_path=folder,
        chunk_store_gib=gib * args.disk_share,
    )


def run(
    args: argparse.Namespace,
    plain: LLM,
    blending: LLM,
    prefix: list[int],
    documents: list[list[int]],
    questions: list[list[int]],
) -> list[Query]:
    rng = np.random.default_rng(args.seed)
    popularity = np.arange(1, len(documents) + 1, dtype=float) ** -args.zipf
    order = rng.permutation(len(documents))  # popularity says nothing about where a document stands in the data set
    queries: list[Query] = []
    start = time.perf_counter()
    for index in range(args.queries):
        chosen = order[rng.choice(len(documents), args.passages, replace=False, p=popularity / popularity.sum())]
        chunks = [documents[i] for i in chosen]
        question = questions[index % len(questions)]
        prompt = {"prefix": prefix, "chunks": chunks, "suffix": question}
        whole = {"prompt_token_ids": [*prefix, *(t for chunk in chunks for t in chunk), *question]}
        if index % 2:
            full = ttft(plain, whole)
        before = counts(blending)
        blend = ttft(blending, prompt)
        memory, disk, encoded = (after - old for after, old in zip(counts(blending), before, strict=True))
        if not index % 2:
            full = ttft(plain, whole)
        # The prefix is a piece of its own, which stays in memory once it is there.
        queries.append(Query(len(chunks), memory - (index > 0), disk, encoded - (index == 0), blend, full))
        if (index + 1) % WINDOW == 0:
            print(f"{index + 1} queries, {time.perf_counter() - start:.0f} s", flush=True)
    return queries


def ttft(llm: LLM, prompt: Any) -> float:
    [output] = llm.generate(prompt, FIRST_TOKEN, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_time is not None and metrics.first_scheduled_time is not None
    return metrics.first_token_time - metrics.first_scheduled_time


def counts(llm: LLM) -> tuple[int, int, int]:
    """Return hits in memory, hits on the disk, and chunks computed."""
    store = llm.llm_engine.chunk_store
    assert store.below
    return store.memory.num_hits, store.below[0].storage.stats.num_hits, llm.llm_engine.composer.num_encoded


def report(args: argparse.Namespace, queries: list[Query], llm: LLM) -> None:
    store = llm.llm_engine.chunk_store
    assert store.below
    store.flush()
    gauges = dict(store.gauges())
    print(f"disk {gauges['disk_bytes'] / 2**20:.1f} MiB, writes dropped {gauges['disk_writes_dropped']:.0f}")
    rows = {"first": queries[:WINDOW], "second": queries[WINDOW : 2 * WINDOW], "last": queries[-WINDOW:]}
    print(f"{'':8s} {'memory':>7s} {'disk':>7s} {'hits':>7s} {'blend':>9s} {'full':>9s} {'gain':>6s}")
    for name, window in rows.items():
        if window:
            memory, disk = (share(window, field) for field in ("memory_hits", "disk_hits"))
            blend, full = (1e3 * statistics.median(getattr(q, field) for q in window) for field in ("blend", "full"))
            print(
                f"{name:8s} {memory:7.1%} {disk:7.1%} {memory + disk:7.1%} {blend:6.1f} ms {full:6.1f} ms "
                f"{gain(window):6.2f}"
            )
    if len(queries) >= 3 * WINDOW:
        for name in ("first", "second"):
            hits = hit_rate(rows["last"]) / hit_rate(rows[name])
            print(f"last / {name}: hit rate {hits:.3f}, gain {gain(rows['last']) / gain(rows[name]):.3f}")


def share(window: Sequence[Query], field: str) -> float:
    mean: float = sum(getattr(query, field) for query in window) / sum(query.chunks for query in window)
    return mean


def hit_rate(window: Sequence[Query]) -> float:
    return share(window, "memory_hits") + share(window, "disk_hits")


def gain(window: Sequence[Query]) -> float:
    """Return the median speed-up of the first token over full prefill."""
    return statistics.median(query.full / query.blend for query in window)


def plot(queries: list[Query], path: Path) -> None:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise SystemExit("--plot needs matplotlib: pip install matplotlib, or leave it out") from error
    starts = range(0, len(queries) - WINDOW + 1, WINDOW // 4)
    ends = [start + WINDOW for start in starts]
    windows = [queries[start : start + WINDOW] for start in starts]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True)
    above.plot(ends, [hit_rate(window) for window in windows])
    above.set(ylabel="chunks found", ylim=(0, 1))
    below.plot(ends, [gain(window) for window in windows])
    below.axhline(1.0, linestyle=":")
    below.set(xlabel=f"queries (each point: the last {WINDOW})", ylabel="gain in time to first token")
    figure.savefig(path)


if __name__ == "__main__":
    main()
