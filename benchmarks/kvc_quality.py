"""Measure what eviction costs in quality: F1 on the demo data sets with 1/2, 1/4 and 1/8 of each prompt's KV, by
metric.

    OMP_NUM_THREADS=1 python -m benchmarks.kvc_quality --markdown benchmarks/results/kvc_quality.md

Every question is answered greedily over all of its passages, prefilled in full; then the prompt's KV is evicted down to
the share, before the second token of the answer is computed: the first one comes from the prefill, which sees all.
`same tokens` is the share of the tokens after the first one that are the same, in the same place, as with all KV kept.
+- is the standard error of the mean difference to that, over the same questions.

With --kvpress-python, kvpress answers the same prompts by the presses that score by the same ideas. The two do not
evict alike. A press keeps the share in every head; here, `auto` lets the heads of all layers compete for some metrics.
A press drops single KVs, and no more while it answers; here whole pages of 16 go, more of them as the answer grows, and
the last 32 tokens and the first 4 always stay.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.answers import difference, same_tokens
from benchmarks.side import press_peer
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
    parser.add_argument("--kvpress-python", type=Path, metavar="PYTHON", help="an interpreter that has kvpress")
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
        whole, tokens, ids = answer(next(iter(engines.values())), prompts, SamplingParams(**options), references)
        lines.append(f"| {len(samples)} x {dataset} | | | all | {100 * statistics.mean(whole):.1f} | | |")
        print(lines[-1], flush=True)
        for (metric, allocation), llm in engines.items():
            for share in args.shares:
                params = SamplingParams(**options, target_compression_rate=share)
                f1, found, _ = answer(llm, prompts, params, references)
                lines.append(row([dataset, metric, allocation, f"{share:g}"], f1, whole, found, tokens))
                print(lines[-1], flush=True)
        if args.kvpress_python is not None:
            limits = {"max_tokens": options["max_tokens"], "stop": "\n"}
            for line in peer_rows(args, dataset, ids, references, limits):
                lines.append(line)
                print(line, flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


def row(
    about: Sequence[str],
    f1: Sequence[float],
    whole: Sequence[float],
    found: Sequence[list[int]],
    tokens: Sequence[list[int]],
) -> str:
    """Return a row of the table: the score, and what differs from the answers with all KV kept."""
    same = f"{100 * same_tokens(found, tokens):.1f}%"
    return f"| {' | '.join([*about, f'{100 * statistics.mean(f1):.1f}', difference(f1, whole), same])} |"


def peer_rows(
    args: argparse.Namespace,
    dataset: str,
    ids: Sequence[list[int]],
    references: Sequence[list[str]],
    limits: dict[str, Any],
) -> list[str]:
    """Return the rows of kvpress, whose differences are to its own answers with all KV kept."""
    presses = [press_peer.PRESSES[metric] for metric in args.metrics if metric in press_peer.PRESSES]
    runs: list[tuple[str | None, float]] = [
        (None, 1.0),
        *((press, share) for press in presses for share in args.shares),
    ]
    versions, answers = press_peer.ask(args.kvpress_python, args.model, ids, runs, **limits)
    scores = [
        [score_prediction(text, list(r)).f1 for (text, _), r in zip(run, references, strict=True)] for run in answers
    ]
    tokens = [[found for _, found in run] for run in answers]
    name = " ".join(f"{package} {number}" for package, number in versions.items())
    lines = [f"| {len(ids)} x {dataset} | {name} | | all | {100 * statistics.mean(scores[0]):.1f} | | |"]
    for (press, share), f1, found in list(zip(runs, scores, tokens, strict=True))[1:]:
        lines.append(row([dataset, f"kvpress {press}", "head", f"{share:g}"], f1, scores[0], found, tokens[0]))
    return lines


def answer(
    llm: LLM, prompts: Sequence[Any], params: SamplingParams, references: Sequence[list[str]]
) -> tuple[list[float], list[list[int]], list[list[int]]]:
    """Return F1 and token ids of every answer, and the token ids of every prompt."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    failed = [output.error for output in outputs if output.error]
    if failed:
        raise RuntimeError(failed[0])
    f1 = [score_prediction(o.outputs[0].text, list(r)).f1 for o, r in zip(outputs, references, strict=True)]
    return f1, [list(o.outputs[0].token_ids) for o in outputs], [list(o.prompt_token_ids) for o in outputs]


if __name__ == "__main__":
    main()
