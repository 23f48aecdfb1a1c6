"""Measure what an FP8 KV cache changes in answers, against a cache of the model's dtype.

    python -m benchmarks.fp8_cache_quality inputs/demo-model --data inputs/musique_s.json --samples 60
    python -m benchmarks.fp8_cache_quality MODEL --data hotpot_dev_distractor_v1.json --samples 60 --output results/fp8

Questions are answered greedily, by full prefill and by blends, whose chunks the same engine has computed and keeps in
the dtype of its cache. An engine with an FP8 cache then answers by the same method, and follows the answer of the first
token by token: agreement and KL are those of `vllm_blend/quality/measures.py`, with the same method in the model's
dtype in the place of full prefill. `again` is an engine with a cache of the model's dtype that prefills in pieces of
256 tokens: what rounding alone changes. With --output it writes .json and .md.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_blend.pipeline.ask import choose_asking
from vllm_blend.pipeline.evaluate import best_score, f1_score
from vllm_blend.pipeline.files import write_text
from vllm_blend.quality.intervals import Bootstrap, Estimate, share
from vllm_blend.quality.questions import Questions, joined_ids, read_questions, select_fitting
from vllm_blend.quality.session import Session, Truth
from vllm_blend.quality.settings import make_settings

FULL = "full prefill"
RULES = ("none", "question_attention@0.15", "value_deviation@0.15")
CACHES: dict[str, dict[str, Any]] = {
    "again": {"max_num_batched_tokens": 256, "max_num_seqs": 16},
    "fp8": {"kv_cache_dtype": "fp8"},
}


@dataclass(frozen=True)
class Found:
    """What a method gave with a cache, a number for each question. KL and agreement are with the model's dtype."""

    f1: list[float]
    agreement: list[bool]
    kl: list[float]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", metavar="MODEL")
    add("--data", required=True, metavar="FILE", help="a data set, as check-model reads them")
    add("--samples", type=int, default=60)
    add("--rules", nargs="+", default=[*RULES], metavar="RULE@RATIO")
    add("--dtype", default="bfloat16")
    add("--tokenizer")
    add("--device", default="auto")
    add("--batch", type=int, default=16)
    add("--name", help="the model's name on the page (default: its file's)")
    add("--output", type=Path, help="keep every number in this path + .json, and the page in .md")
    args = parser.parse_args(argv)
    words = [Path(word).name if Path(word).is_absolute() else word for word in (sys.argv[1:] if argv is None else argv)]
    found = measure(args) | {"command": shlex.join(["python", "-m", "benchmarks.fp8_cache_quality", *words])}
    text = page(found)
    print(text)
    if args.output:
        write_text(args.output.with_name(f"{args.output.name}.json"), json.dumps(found) + "\n")
        write_text(args.output.with_name(f"{args.output.name}.md"), text)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return what `page` shows."""
    methods = {FULL: None} | {f"{s.rule} {100 * s.ratio:g}%": s.prompt for s in make_settings(args.rules, [0.15])}
    common = {name: getattr(args, name) for name in ("dtype", "tokenizer", "device")}
    with Session(args.model, args.batch, **common) as session:
        read = read_questions(args.data, args.samples)
        asking = choose_asking(session.engine.tokenizer, args.data)
        questions = select_fitting(replace(read, asking=asking), session.engine)
        sizes = {"auto": session.engine.composer.bytes_per_token}
        truths = {name: _truths(session, questions, prompt) for name, prompt in methods.items()}
    rows: dict[str, Any] = {
        name: {"auto": {"f1": _scores(questions, [truth.answer.text for truth in own])}} for name, own in truths.items()
    }
    for cache, options in CACHES.items():
        with Session(args.model, args.batch, **common | options) as session:
            sizes[cache] = session.engine.composer.bytes_per_token
            for name, prompt in methods.items() if cache == "fp8" else [(FULL, None)]:
                rows[name][cache] = vars(_compare(session, questions, prompt, truths[name]))
    return {
        "date": str(date.today()),
        "model": args.name or Path(args.model).name,
        "questions": f"{len(questions.samples)} of {questions.name} ({questions.form}, asked by {asking.name})",
        "dtype": args.dtype,
        "torch": torch.__version__,
        "bytes": sizes,
        "methods": rows,
    }


def _prompts(session: Session, questions: Questions, keys: dict[str, Any] | None) -> list[Any]:
    """Return prompts that blend with these keys, or plain ones. The chunks of the former are in the store."""
    prompts = [questions.prompt(sample) for sample in questions.samples]
    if keys is None:
        return [{"prompt_token_ids": joined_ids(session.engine, prompt)} for prompt in prompts]
    return [prompt | keys for prompt in prompts]


def _truths(session: Session, questions: Questions, keys: dict[str, Any] | None) -> list[Truth]:
    assert questions.asking is not None
    return session.truths(_prompts(session, questions, keys), questions.asking.max_tokens)


def _compare(session: Session, questions: Questions, keys: dict[str, Any] | None, truths: Sequence[Truth]) -> Found:
    assert questions.asking is not None
    prompts = _prompts(session, questions, keys)
    followings = session.follow(prompts, truths)
    answers = session.answer(prompts, questions.asking.max_tokens)
    kl = [statistics.fmean(following.kl) for following in followings]
    f1 = _scores(questions, [answer.text for answer in answers])
    return Found(f1, [following.agrees for following in followings], kl)


def _scores(questions: Questions, texts: Sequence[str]) -> list[float]:
    return [
        best_score(f1_score, text, list(sample.answers)) for text, sample in zip(texts, questions.samples, strict=True)
    ]


def page(found: dict[str, Any]) -> str:
    """Return the page of what was measured."""
    sizes = found["bytes"]
    lines = [
        f"# An FP8 KV cache: {found['model']}, {found['dtype']}",
        "",
        f"    {found['command']}",
        "",
        f"{found['date']}, torch {found['torch']}, {found['questions']}. A token takes {sizes['auto']} bytes of KV in "
        f"the model's dtype and {sizes['fp8']} in FP8. Shares are in percent, with 95% intervals over questions.",
        "",
        "| method | cache | F1 | less the model's dtype | same answer | KL, nats a token |",
        "|---|---|---|---|---|---|",
    ]
    for name, caches in found["methods"].items():
        plain = np.array(caches["auto"]["f1"])
        bootstrap = Bootstrap(len(plain), 0)
        lines.append(f"| {name} | auto | {_percent(bootstrap.mean(plain))} | | | |")
        for cache, own in caches.items():
            if cache != "auto":
                cells = [_percent(bootstrap.mean(np.array(own["f1"])))]
                cells.append(_percent(bootstrap.difference(np.array(own["f1"]), plain)))
                cells.append(_percent(share(sum(own["agreement"]), len(plain))))
                lines.append(f"| {name} | {cache} | {' | '.join(cells)} | {statistics.fmean(own['kl']):.4f} |")
    return "\n".join(lines) + "\n"


def _percent(estimate: Estimate) -> str:
    value, low, high = (round(100 * each, 1) + 0.0 for each in (estimate.value, estimate.low, estimate.high))
    return f"{value:.1f} ({low:.1f} to {high:.1f})"


if __name__ == "__main__":
    main()
