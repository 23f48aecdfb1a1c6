"""Speculative decoding against plain decoding, one request at a time: accepted tokens and speed.

    OMP_NUM_THREADS=1 python benchmarks/spec_decode.py --markdown benchmarks/results/spec_decode_cpu.md

Every request runs with each drafter and plain, in turns and several times, and each of its times is the least of these:
other work on the machine does not count. Plain is the drafter's own engine with drafting switched off, as two equal
engines need not be equally fast: where their weights lie in memory matters more than what is measured here. Prefixes
are cached, so that runs differ in decoding alone. The speed-up is of the time from the first token to the last;
"whole call" includes the rest. The last rows are the worst case: random tokens, where every draft is wrong. Answers
must be equal, or the run fails.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_blend import LLM, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import prompt_for
from vllm_blend.spec_decode.drafters import DRAFTERS

DATASETS = ("musique_s", "wikimqa_s", "samsum")
HEAD = "| requests | drafter | tokens per step | accepted of drafted | drafts in steps | decode speed-up | whole call |"


@dataclass
class Work:
    """Requests of one kind."""

    name: str
    prompts: list[Any]
    params: SamplingParams


@dataclass
class Tally:
    """What an engine took for some work."""

    decode: float = 0.0  # seconds
    whole: float = 0.0
    answers: list[list[int]] = field(default_factory=list)
    steps: int = 0  # of decoding, after the first token
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inputs/demo-model")
    parser.add_argument("--inputs", default="inputs")
    parser.add_argument("--requests", type=int, default=40, help="of each data set")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8, help="num_speculative_tokens")
    parser.add_argument("--markdown", help="file to write the table to")
    args = parser.parse_args()

    engines = {}
    for method in sorted(DRAFTERS):
        config = {"method": method, "num_speculative_tokens": args.tokens}
        engines[method] = LLM(args.model, speculative_config=config)
    lines = [f"{torch.get_num_threads()} threads, torch {torch.__version__}, {args.tokens} draft tokens at most", ""]
    lines += [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    works = [data_set(args.inputs, name, args.requests) for name in DATASETS]
    print(*lines, sep="\n", flush=True)
    for work in [*works, random_tokens(args.requests // 4, engines["ngram"])]:
        for method, llm in engines.items():
            lines.append(row(work, method, *measure(llm, work, args.repeats)))
            print(lines[-1], flush=True)
    if args.markdown:
        Path(args.markdown).write_text("# Speculative decoding, batch 1\n\n" + "\n".join(lines) + "\n")


def data_set(folder: str, name: str, count: int) -> Work:
    """Answers end at the end of a line, as in the pipeline."""
    samples = load_dataset(f"{folder}/{name}.json")[:count]
    prompts = [build_qa_prompt(normalize_sample(sample, i), name) for i, sample in enumerate(samples)]
    return Work(name, prompts, SamplingParams(temperature=0, max_tokens=prompt_for(name).max_tokens, stop=["\n"]))


def random_tokens(count: int, llm: LLM) -> Work:
    """Prompts and draws that nothing foresees: a temperature that makes all tokens alike."""
    rng, vocabulary = random.Random(0), llm.llm_engine.hf_config.vocab_size
    prompts = [{"prompt_token_ids": [rng.randrange(3, vocabulary) for _ in range(500)]} for _ in range(count)]
    return Work("random tokens", prompts, SamplingParams(temperature=50.0, seed=1, max_tokens=64, ignore_eos=True))


def measure(llm: LLM, work: Work, repeats: int) -> tuple[Tally, Tally]:
    """Plain and with drafts, one request at a time."""
    engine = llm.llm_engine
    drafting = engine.speculation
    plain, spec = Tally(), Tally()
    for prompt in work.prompts:
        best: dict[int, tuple[float, float]] = {}
        for turn in range(repeats + 1):
            for tally in (plain, spec) if turn % 2 else (spec, plain):
                engine.speculation = drafting if tally is spec else None
                before = counts(llm)
                started = time.perf_counter()
                [output] = llm.generate([prompt], work.params, use_tqdm=False)
                whole = time.perf_counter() - started
                if turn == 0:  # fills the prefix cache
                    continue
                metrics = output.metrics
                assert metrics is not None
                decode = (metrics.last_token_time or 0.0) - (metrics.first_token_time or 0.0)
                old = best.get(id(tally), (decode, whole))
                best[id(tally)] = min(decode, old[0]), min(whole, old[1])
                if turn == 1:
                    tally.answers.append(list(output.outputs[0].token_ids))
                steps, *drafts = (b - a for a, b in zip(before, counts(llm), strict=True))
                tally.steps += steps - 1
                tally.drafts, tally.drafted, tally.accepted = (
                    total + new
                    for total, new in zip((tally.drafts, tally.drafted, tally.accepted), drafts, strict=True)
                )
        for tally in (plain, spec):
            decode, whole = best[id(tally)]
            tally.decode += decode
            tally.whole += whole
    return plain, spec


def counts(llm: LLM) -> Sequence[int]:
    metrics = llm.llm_engine.metrics
    return metrics.num_steps, metrics.spec_drafts, metrics.spec_draft_tokens, metrics.spec_accepted_tokens


def row(work: Work, method: str, plain: Tally, spec: Tally) -> str:
    if spec.answers != plain.answers:
        raise RuntimeError(f"{work.name}: {method} changed answers")
    cells = [
        f"{len(work.prompts)} x {work.name}",
        method,
        f"{plain.steps / max(1, spec.steps):.2f}",
        f"{spec.accepted / max(1, spec.drafted):.0%}",
        f"{spec.drafts / max(1, spec.steps):.0%}",
        f"{plain.decode / max(1e-9, spec.decode):.2f}x",
        f"{plain.whole / spec.whole:.2f}x",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
