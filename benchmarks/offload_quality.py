"""Measure answers in mode "resident" with few chunks on the device, by predictor: F1 on the demo data sets.

    OMP_NUM_THREADS=1 python -m benchmarks.offload_quality --markdown benchmarks/results/offload_quality.md

Every question is answered over all of its passages, prefilled in full; while decoding, a share of them is on the
device. The first passages there are those that BM25 ranks first ("ranked"), or those that the predictor chooses after
the prefill's last token ("not ranked"; retrieval_rank then has the first passages). The first token of an answer comes
from the prefill, which sees everything, so predictors differ in the others; their share of equality with the answers of
all on the device is given too. +- is the standard error of the mean difference to retrieval_rank, which moves nothing,
over the same questions.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.answers import difference, same_tokens
from vllm_blend import LLM, SamplingParams
from vllm_blend.features.offload.extension import ChunkOffload
from vllm_blend.features.offload.predictors import PREDICTORS
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample
from vllm_blend.pipeline.bm25 import BM25Retrieval
from vllm_blend.pipeline.config import RetrievalConfig
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.evaluate import score_prediction
from vllm_blend.pipeline.prompts import prompt_for
from vllm_blend.pipeline.retriever import Collection

DATASETS = ("musique_s", "wikimqa_s", "samsum")
FLOOR = "retrieval_rank"
HEAD = "| data set | start | predictor | F1 | difference to retrieval_rank | same tokens | promotions an answer |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inputs/demo-model")
    parser.add_argument("--inputs", default="inputs")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS))
    parser.add_argument("--samples", type=int, default=200, help="most questions of each data set")
    parser.add_argument("--fraction", type=float, default=0.2, help="share of the chunks on the device")
    parser.add_argument("--predictors", nargs="+", default=sorted(PREDICTORS))
    parser.add_argument("--drafts", action="store_true", help="decode speculatively, by suffix automata")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(argv)
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    common: dict[str, Any] = {"device": "cpu", "max_num_seqs": args.batch, "block_size": 16}
    if args.drafts:
        common["speculative_config"] = {"method": "suffix", "num_speculative_tokens": 8}
    moving = {"offload_mode": "resident", "offload_device_fraction": args.fraction}
    plain = LLM(args.model, **common)
    engines = {name: LLM(args.model, **common, **moving, offload_predictor=name) for name in args.predictors}
    what = f"{args.fraction:.0%} of the chunks on the device" + (", with drafts" if args.drafts else "")
    lines = [f"{args.model}, {what}", "", HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    print(*lines, sep="\n", flush=True)
    for dataset in args.datasets:
        samples = [normalize_sample(s, i) for i, s in enumerate(load_dataset(f"{args.inputs}/{dataset}.json"))]
        samples = samples[: args.samples]
        prompts: list[Any] = [build_qa_prompt(sample, dataset) for sample in samples]
        params = SamplingParams(temperature=0, max_tokens=prompt_for(dataset).max_tokens, stop=["\n"])
        outputs = plain.generate(prompts, params, use_tqdm=False)
        whole = [list(output.outputs[0].token_ids) for output in outputs]
        f1 = [score_prediction(o.outputs[0].text, list(s.answers)).f1 for o, s in zip(outputs, samples, strict=True)]
        lines.append(f"| {len(samples)} x {dataset} | | all on the device | {100 * statistics.mean(f1):.1f} | | | |")
        print(lines[-1], flush=True)
        for start in ("ranked", "not ranked"):
            asked = prompts
            if start == "ranked":
                asked = [p | {"chunk_ranking": ranking(s)} for p, s in zip(prompts, samples, strict=True)]
            floor: list[float] = []
            for name in sorted(engines, key=lambda name: name != FLOOR):
                llm = engines[name]
                offload = llm.llm_engine.extension(ChunkOffload)
                assert offload is not None
                before = offload.scheduler.num_promotions
                outputs = llm.generate(asked, params, use_tqdm=False)
                f1 = [
                    score_prediction(o.outputs[0].text, list(s.answers)).f1
                    for o, s in zip(outputs, samples, strict=True)
                ]
                floor = floor or f1
                cells = [
                    dataset,
                    start,
                    name,
                    f"{100 * statistics.mean(f1):.1f}",
                    difference(f1, floor),
                    f"{100 * same_tokens([list(o.outputs[0].token_ids) for o in outputs], whole):.1f}%",
                    f"{(offload.scheduler.num_promotions - before) / len(samples):.2f}",
                ]
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


def ranking(sample: Sample) -> list[int]:
    """Return the passages of a sample, best first, by BM25."""
    retriever = BM25Retrieval(RetrievalConfig())
    collection = Collection(sample.sample_id, sample.passages)
    return [index for index, _ in retriever.rank(retriever.build_index(collection), collection, sample.question)]


if __name__ == "__main__":
    main()
