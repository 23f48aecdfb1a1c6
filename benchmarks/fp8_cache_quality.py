"""Measure what an FP8 KV cache costs in quality, against a cache of the model's dtype, on held-out worlds.

    python -m benchmarks.fp8_cache_quality inputs/demo-model:3 inputs/demo-model-long:4 [--output F] [--markdown F]

MODEL:FAMILIES are models, and how many families the worlds have that they are asked about. The worlds are those of the
development split: nothing is chosen here, and the test split is not touched. Every question is answered greedily, by
full prefill and by blends, whose chunks the same engine has computed and keeps in the dtype of its cache. Intervals are
over worlds (`vllm_blend/quality/intervals.py`), differences over the same questions. `again` prefills in pieces of 256
tokens with a cache of the model's dtype: what rounding alone changes.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_blend import LLM, SamplingParams
from vllm_blend.pipeline.evaluate import best_score, exact_match, first_line
from vllm_blend.quality.held_out_worlds import digest_of, held_out_questions, world_of
from vllm_blend.quality.intervals import Bootstrap, Estimate
from vllm_blend.quality.questions import Questions
from vllm_blend.quality.splits import DEVELOPMENT

METHODS: dict[str, dict[str, Any]] = {
    "full prefill": {},
    "plain reuse": {"blend_selector": "none"},
    "question_attention, 15%": {"blend_selector": "question_attention", "blend_recompute_ratio": 0.15},
    "value_deviation, 15%": {"blend_selector": "value_deviation", "blend_recompute_ratio": 0.15},
}
CACHES: dict[str, dict[str, Any]] = {
    "auto": {},
    "again": {"max_num_batched_tokens": 256, "max_num_seqs": 16},
    "fp8": {"kv_cache_dtype": "fp8"},
}
Answers = dict[str, dict[str, list[str]]]  # cache -> method -> answers


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL:FAMILIES")
    parser.add_argument("--samples", type=int, default=150)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS, metavar="METHOD")
    parser.add_argument("--caches", nargs="+", default=[*CACHES], choices=CACHES, metavar="CACHE")
    parser.add_argument("--output", type=Path, help="keep every answer in this file")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args(argv)
    command = shlex.join(["python", "-m", "benchmarks.fp8_cache_quality", *(sys.argv[1:] if argv is None else argv)])
    lines, kept = [f"{date.today()}, CPU, torch {torch.__version__}. `{command}`"], {}
    for asked in args.models:
        model, _, families = asked.rpartition(":")
        data = held_out_questions(DEVELOPMENT, int(families), samples=args.samples)
        answers, sizes = answer_all(model, data, args)
        lines += ["", f"## {Path(model).name}, {args.dtype}, development split, worlds of {families} families", ""]
        lines += table(data, answers, sizes)
        samples = [sample for questions in data for sample in questions.samples]
        kept[asked] = {
            "worlds": digest_of(samples),
            "right": [list(sample.answers) for sample in samples],
            "answers": answers,
        }
    print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")
    if args.output:
        args.output.write_text(json.dumps({"command": command, "models": kept}, indent=1) + "\n")


def answer_all(model: str, data: Sequence[Questions], args: argparse.Namespace) -> tuple[Answers, dict[str, int]]:
    """Return answers by cache and method, and the bytes of a token by cache."""
    answers: Answers = {}
    sizes: dict[str, int] = {}
    for cache in args.caches:
        answers[cache] = {}
        llm = LLM(model, dtype=args.dtype, enable_blending=True, enable_prefix_caching=False, **CACHES[cache])
        sizes[cache] = llm.llm_engine.model_executor.driver_worker.shape.bytes_per_token
        for method in args.methods:
            settings = METHODS[method]
            if cache == "again" and settings:
                continue
            answers[cache][method] = [text for questions in data for text in answer(llm, questions, settings)]
            print(f"{model} {cache} {method}", file=sys.stderr, flush=True)
        llm.shutdown()
        del llm
        gc.collect()
    return answers, sizes


def answer(llm: LLM, questions: Questions, settings: dict[str, Any]) -> list[str]:
    """Return the answers to some questions. Full prefill is asked of one plain text: nothing of it is stored."""
    prompts: list[Any] = []
    for sample in questions.samples:
        prompt = questions.prompt(sample)
        whole = "".join(str(piece) for piece in (prompt["prefix"], *prompt["chunks"], prompt["suffix"]))
        prompts.append({**prompt, **settings} if settings else whole)
    params = SamplingParams(temperature=0, max_tokens=questions.style.max_tokens, stop=["\n"])
    outputs = llm.generate(prompts, params, use_tqdm=False)
    if failed := [output.error for output in outputs if output.error]:
        raise RuntimeError(failed[0])
    return [first_line(output.outputs[0].text) for output in outputs]


def table(data: Sequence[Questions], answers: Answers, sizes: dict[str, int]) -> list[str]:
    samples = [sample for questions in data for sample in questions.samples]
    worlds = [world_of(sample.sample_id) for sample in samples]
    bootstrap = Bootstrap(len(samples), 0, worlds)
    lines = [
        f"{len(samples)} questions about {len(set(worlds))} worlds; a token takes {sizes['auto']} bytes of KV in the "
        f"model's dtype and {sizes['fp8']} in FP8. In percent, with 95% intervals.",
        "",
        "| method | cache | exact match | FP8 less the model's dtype | same answer |",
        "|---|---|---|---|---|",
    ]
    for method, plain in answers["auto"].items():
        for cache, found in answers.items():
            if method not in found:
                continue
            mine, theirs = (
                np.array(
                    [best_score(exact_match, text, list(s.answers)) for text, s in zip(texts, samples, strict=True)]
                )
                for texts in (found[method], plain)
            )
            cells = [method, cache, percent(bootstrap.mean(mine))]
            if cache != "auto":
                same = np.mean([a == b for a, b in zip(found[method], plain, strict=True)])
                cells += [percent(bootstrap.difference(mine, theirs)), f"{100 * same:.1f}"]
            lines.append(f"| {' | '.join(cells + [''] * (5 - len(cells)))} |")
    return lines


def percent(estimate: Estimate) -> str:
    assert estimate.low is not None and estimate.high is not None
    return f"{100 * estimate.value:.1f} ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


if __name__ == "__main__":
    main()
