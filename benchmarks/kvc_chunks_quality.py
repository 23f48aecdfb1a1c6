"""What compressed chunks in the store cost in quality: F1 on the demo data sets with 1/2 and 1/4 of each passage's KVs,
by metric, when nothing of a prompt is computed again, and when question attention repairs 15% of it.

    OMP_NUM_THREADS=1 python -m benchmarks.kvc_chunks_quality --markdown benchmarks/results/kvc_chunks_quality.md

Every question is answered greedily over all of its passages, which are stored after the instruction. `bytes`: of the
chunk store for one question's passages, against whole ones. +- is the standard error of the mean difference to whole
chunks, over the same questions.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.answers import difference
from benchmarks.kvc_quality import answer
from vllm_blend import LLM, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import prompt_for

HEAD = "| data set | recomputed | kept | metric | bytes | F1 | difference |"
RULES: dict[str, dict[str, Any]] = {
    "nothing": {"blend_selector": "none"},
    "question attention 15%": {"blend_selector": "question_attention", "blend_recompute_ratio": 0.15},
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inputs/demo-model")
    parser.add_argument("--inputs", default="inputs")
    parser.add_argument("--datasets", nargs="+", default=["musique_s", "wikimqa_s", "samsum"])
    parser.add_argument("--samples", type=int, default=50, help="of each data set, at most")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.25])
    parser.add_argument("--metrics", nargs="+", default=["keydiff", "knorm", "random"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args(argv)
    lines = [f"{date.today()}, {args.model}, blocks of 16 tokens", "", HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    print(*lines, sep="\n", flush=True)
    for dataset in args.datasets:
        for line in table(dataset, args):
            lines.append(line)
            print(line, flush=True)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


def table(dataset: str, args: argparse.Namespace) -> Iterator[str]:
    """Rows of one data set."""
    samples = [normalize_sample(s, i) for i, s in enumerate(load_dataset(f"{args.inputs}/{dataset}.json"))]
    samples = samples[: args.samples]
    prompts: list[Any] = [build_qa_prompt(sample, dataset) for sample in samples]
    references = [list(sample.answers) for sample in samples]
    params = SamplingParams(temperature=0, max_tokens=prompt_for(dataset).max_tokens, stop=["\n"])
    whole: dict[str, list[float]] = {}
    whole_bytes = 0
    for share, metric in [(None, ""), *((share, metric) for metric in args.metrics for share in args.shares)]:
        llm = engine(args, share, metric)
        llm.generate(prompts[:1], params, use_tqdm=False)
        num_bytes = llm.llm_engine.chunk_store.num_bytes
        whole_bytes = whole_bytes or num_bytes
        for rule, settings in RULES.items():
            f1, _ = answer(llm, [prompt | settings for prompt in prompts], params, references)
            mean = f"{100 * statistics.mean(f1):.1f}"
            if share is None:
                whole[rule] = f1
                yield row(f"{len(samples)} x {dataset}", rule, "all", "", "1.00", mean, "")
            else:
                size = f"{num_bytes / whole_bytes:.2f}"
                yield row(dataset, rule, f"{share:g}", metric, size, mean, difference(f1, whole[rule]))


def engine(args: argparse.Namespace, share: float | None, metric: str) -> LLM:
    """With whole chunks, where `share` is None."""
    common: dict[str, Any] = {"device": "cpu", "max_num_seqs": args.batch, "num_gpu_blocks_override": 1024}
    if share is not None:
        common |= {"enable_kvc": True, "blend_chunk_kept_share": share, "blend_chunk_metric": metric}
    return LLM(args.model, enable_blending=True, **common)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
