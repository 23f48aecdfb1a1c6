"""Measure what eviction costs in quality: F1 on the demo data sets with 1/2, 1/4 and 1/8 of each prompt's KV, by
metric.

    OMP_NUM_THREADS=1 python -m benchmarks.kvc_quality --markdown benchmarks/results/kvc_quality.md

Every question is answered greedily over all of its passages, prefilled in full; then the prompt's KV is evicted down to
the share, before the second token of the answer is computed: the first one comes from the prefill, which sees all.
`same tokens` is the share of the tokens after the first one that are the same, in the same place, as with all KV kept.
+- is the standard error of the mean difference to that, over the same questions.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.answers import difference, same_tokens
from vllm_blend import LLM, SamplingParams
from vllm_blend.features.kv_compress.metrics import METRICS
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample
from vllm_blend.pipeline.evaluate import score_prediction
from vllm_blend.pipeline.prompts import prompt_for

DATASETS = ("musique_s", "wikimqa_s", "samsum")
HEAD = "| data set | metric | allocation | kept | F1 | difference | same tokens |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inputs/demo-model")
    parser.add_argument("--inputs", default="inputs")
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS))
    parser.add_argument("--samples", type=int, default=200, help="most questions of each data set")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.25, 0.125])
    parser.add_argument("--metrics", nargs="+", default=sorted(METRICS))
    parser.add_argument("--allocations", nargs="+", default=["auto"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(argv)
    common: dict[str, Any] = {"device": "cpu", "max_num_seqs": args.batch, "num_gpu_blocks_override": 1024}
    engines = {
        (metric, allocation): LLM(args.model, enable_kvc=True, kvc_metric=metric, kvc_allocation=allocation, **common)
        for metric in args.metrics
        for allocation in args.allocations
    }
    lines = [f"{date.today()}, {args.model}, blocks of 16 tokens", "", HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    print(*lines, sep="\n", flush=True)
    for dataset in args.datasets:
        samples = [normalize_sample(s, i) for i, s in enumerate(load_dataset(f"{args.inputs}/{dataset}.json"))]
        samples = samples[: args.samples]
        prompts: list[Any] = [build_qa_prompt(sample, dataset) for sample in samples]
        references = [list(sample.answers) for sample in samples]
        options: dict[str, Any] = {"temperature": 0, "max_tokens": prompt_for(dataset).max_tokens, "stop": ["\n"]}
        whole, tokens = answer(next(iter(engines.values())), prompts, SamplingParams(**options), references)
        lines.append(f"| {len(samples)} x {dataset} | | | all | {100 * statistics.mean(whole):.1f} | | |")
        print(lines[-1], flush=True)
        for (metric, allocation), llm in engines.items():
            for share in args.shares:
                params = SamplingParams(**options, target_compression_rate=share)
                f1, found = answer(llm, prompts, params, references)
                cells = [
                    *(dataset, metric, allocation, f"{share:g}", f"{100 * statistics.mean(f1):.1f}"),
                    difference(f1, whole),
                    f"{100 * same_tokens(found, tokens):.1f}%",
                ]
                lines.append(f"| {' | '.join(cells)} |")
                print(lines[-1], flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


def answer(
    llm: LLM, prompts: Sequence[Any], params: SamplingParams, references: Sequence[list[str]]
) -> tuple[list[float], list[list[int]]]:
    """Return F1 and token ids of every answer."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    failed = [output.error for output in outputs if output.error]
    if failed:
        raise RuntimeError(failed[0])
    f1 = [score_prediction(o.outputs[0].text, list(r)).f1 for o, r in zip(outputs, references, strict=True)]
    return f1, [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    main()
