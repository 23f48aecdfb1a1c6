"""Stage 1: retrieve the passages of each question that are worth keeping close, by BM25 or by ColBERT.

    python -m vllm_blend.pipeline.retrieval --dataset inputs/musique_s.json --top-k 5

writes results/retrieval/musique_s_rag_both_k5.json: {"config", "summary", "results"}. A result is the sample as it was,
with `retrieved`, a list of {index, title, text, page_id, score, neighbor_of}, best first, and the plain indices and
scores under the keys that the configuration names. The summary has the recall against gold passages if the data set
knows them.

Questions are searched in their own sample's passages by default, as these data sets bring about ten candidates for each
question and stage 2 caches exactly those; scope "corpus" searches the passages of all samples.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.bm25 import BM25Retrieval
from vllm_blend.pipeline.colbert import ColbertRetrieval
from vllm_blend.pipeline.config import RetrievalConfig, add_section_flags, section_from_flags
from vllm_blend.pipeline.datasets import load_dataset, normalize_sample
from vllm_blend.pipeline.files import write_json
from vllm_blend.pipeline.retriever import Retrieval

__all__ = ["BM25Retrieval", "ColbertRetrieval", "RetrievalConfig", "run_retrieval", "summarize"]

RETRIEVALS: dict[str, type[Retrieval]] = {"bm25": BM25Retrieval, "colbert": ColbertRetrieval}


def run_retrieval(config: RetrievalConfig) -> dict[str, Any]:
    """Read the data set and retrieve; write and return {"config", "summary", "results"}."""
    samples = load_dataset(config.input_path)
    if config.max_samples:
        samples = samples[: config.max_samples]
    retrieval = RETRIEVALS[config.backend](config)
    results = retrieval.retrieve(retrieval.prepare(samples))
    output = {"config": asdict(config), "summary": summarize(results, config), "results": results}
    write_json(config.output_path, output)
    return output


def summarize(results: Sequence[dict[str, Any]], config: RetrievalConfig) -> dict[str, Any]:
    """Return the recall over the samples that know their gold passages, in all and by kind of question; None if none
    does.

    `recall` is the mean share of gold passages that were retrieved, `all_gold` the share of questions with all of them.
    """
    scores: dict[str, list[float]] = {}
    for i, result in enumerate(results):
        sample = normalize_sample(result, i, config.page_id_key)
        if sample.gold:
            # By content: in scope corpus, an index does not refer to the sample's own passages.
            found = {(p["title"], p["text"]) for p in result["retrieved"]}
            hits = [(sample.passages[g].title, sample.passages[g].text) in found for g in sample.gold]
            scores.setdefault(sample.kind or "unknown", []).append(sum(hits) / len(hits))
    together = [score for of_kind in scores.values() for score in of_kind]
    return {
        "samples": len(results),
        "samples_with_gold": len(together),
        **_recall(together),
        "by_kind": {kind: {"samples": len(of_kind), **_recall(of_kind)} for kind, of_kind in scores.items()},
    }


def _recall(scores: list[float]) -> dict[str, float | None]:
    if not scores:
        return {"recall": None, "all_gold": None}
    return {"recall": sum(scores) / len(scores), "all_gold": sum(s == 1 for s in scores) / len(scores)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Retrieve the best passages for every question of a data set.")
    parser.add_argument(
        "--dataset", help="data set file; its name becomes the data set's name unless that is given too"
    )
    add_section_flags(parser, RetrievalConfig)
    args = parser.parse_args(argv)
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it turns debug output on when imported
    config = section_from_flags(parser, args, "retrieval")
    if args.dataset:
        name = args.dataset_name if hasattr(args, "dataset_name") else Path(args.dataset).stem
        config = replace(config, dataset_path=args.dataset, dataset_name=name)
    try:
        summary = run_retrieval(config)["summary"]
    except (ImportError, OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(f"{summary['samples']} questions -> {config.output_path}")
    if summary["samples_with_gold"]:
        rows = {"all": summary | {"samples": summary["samples_with_gold"]}, **summary["by_kind"]}
        for kind, row in rows.items():
            print(
                f"  {kind:8s} {row['samples']:4d} questions: recall@{config.top_k} {row['recall']:.3f}, "
                f"all gold passages {row['all_gold']:.3f}"
            )


if __name__ == "__main__":
    main()
