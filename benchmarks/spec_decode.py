"""Measure speculative against plain decoding, one request at a time: accepted tokens and speed.

    OMP_NUM_THREADS=1 python -m benchmarks.spec_decode --markdown benchmarks/results/spec_decode_cpu.md
    python -m benchmarks.spec_decode --device cuda --shape mistral-7b --works random --requests 40

Every request runs with each drafter and plain, in turns and several times, and the least of these times counts, so that
other work on the machine does not. Plain decoding uses the drafter's own engine with drafting switched off, as two
equal engines need not be equally fast: where their weights lie in memory matters more than what is measured here.
Prefixes are cached, so that runs differ in decoding alone. The speed-up is that of the time from the first token to the
last, "median pair" that of the median request; "whole call" includes the rest. The last rows are the worst case: random
tokens, where a real drafter is never right and makes few drafts, and where "always_wrong" makes as many as it may.
Answers must be equal, or the run fails (on a GPU, rounding differs with the rows of a step, so they are not compared).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from benchmarks.offload import SHAPES, make_model
from vllm_blend import LLM, SamplingParams
from vllm_blend.features.spec_decode.drafters import DRAFTERS, Drafter, History, register_drafter
from vllm_blend.features.spec_decode.extension import DraftCounts, SpeculativeDecoding
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample
from vllm_blend.pipeline.prompts import prompt_for

DATASETS = ("musique_s", "wikimqa_s", "samsum")
RANDOM = "random"
HEAD = (
    "| requests | drafter | tokens per step | accepted of drafted | drafts in steps | decode speed-up | median pair "
    "| whole call |"
)


@register_drafter
@dataclass(frozen=True)
class AlwaysWrong(Drafter):
    """Drafts as much as it may, with a token that random draws hardly ever give."""

    name: ClassVar[str] = "always_wrong"

    def propose(self, history: History, count: int) -> list[int]:
        return [2] * count


@dataclass
class Work:
    """Requests of one kind."""

    name: str
    prompts: list[Any]
    params: SamplingParams


@dataclass
class Tally:
    """The time and steps that an engine took for some work."""

    decode: float = 0.0  # seconds
    whole: float = 0.0
    times: list[float] = field(default_factory=list)  # of decoding, by request
    answers: list[list[int]] = field(default_factory=list)
    steps: int = 0  # of decoding, after the first token
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inputs/demo-model")
    parser.add_argument("--inputs", default="inputs")
    parser.add_argument("--requests", type=int, default=40, help="of each data set; a quarter as many random")
    parser.add_argument("--works", nargs="+", choices=[*DATASETS, RANDOM], default=[*DATASETS, RANDOM])
    parser.add_argument("--drafters", nargs="+", choices=sorted(DRAFTERS), default=sorted(DRAFTERS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="random weights of this shape instead of --model")
    parser.add_argument("--forget", action="store_true", help="clear the drafter before every request")
    parser.add_argument("--output-tokens", type=int, default=64, help="tokens in the answers of random requests")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8, help="num_speculative_tokens")
    parser.add_argument("--markdown", help="file to write the table to")
    args = parser.parse_args(argv)

    options: dict[str, Any] = {"device": args.device, "max_num_seqs": 16 if args.device == "cpu" else 32}
    with tempfile.TemporaryDirectory() as folder:
        if args.shape is not None:
            make_model(Path(folder), args.shape, 0, 0, 0)
            options |= {"load_format": "dummy", "max_model_len": 2048, "num_gpu_blocks_override": 1024}
        engines = {
            method: LLM(
                folder if args.shape else args.model,
                speculative_config={"method": method, "num_speculative_tokens": args.tokens},
                **options,
            )
            for method in args.drafters
            if RANDOM in args.works or method != AlwaysWrong.name
        }
    where = f"{torch.get_num_threads()} threads" if args.device == "cpu" else torch.cuda.get_device_name()
    model = args.shape or Path(args.model).name
    lines = [f"{where}, torch {torch.__version__}, {model}, {args.tokens} draft tokens at most", ""]
    lines += [HEAD, "|---" * HEAD.count(" | ") + "|---|"]
    works = [data_set(args.inputs, name, args.requests) for name in args.works if name != RANDOM]
    if RANDOM in args.works:
        works.append(random_tokens(max(3, args.requests // 4), args.output_tokens, next(iter(engines.values()))))
    print(*lines, sep="\n", flush=True)
    for work in works:
        for method, llm in engines.items():
            if method == AlwaysWrong.name and work.name != RANDOM:
                continue
            lines.append(
                row(work, method, *measure(llm, work, args.repeats, args.forget), compared=args.device == "cpu")
            )
            print(lines[-1], flush=True)
    if args.markdown:
        Path(args.markdown).write_text("# Speculative decoding, batch 1\n\n" + "\n".join(lines) + "\n")


def data_set(folder: str, name: str, count: int) -> Work:
    """Return the work of a data set. Answers end at the end of a line, as in the pipeline."""
    samples = load_dataset(f"{folder}/{name}.json")[:count]
    prompts = [build_qa_prompt(normalize_sample(sample, i), name) for i, sample in enumerate(samples)]
    return Work(name, prompts, SamplingParams(temperature=0, max_tokens=prompt_for(name).max_tokens, stop=["\n"]))


def random_tokens(count: int, num_tokens: int, llm: LLM) -> Work:
    """Return prompts and draws that cannot be predicted: the temperature makes all tokens alike."""
    rng, vocabulary = random.Random(0), llm.llm_engine.hf_config.vocab_size
    prompts = [{"prompt_token_ids": [rng.randrange(3, vocabulary) for _ in range(500)]} for _ in range(count)]
    asked = SamplingParams(temperature=50.0, seed=1, max_tokens=num_tokens, ignore_eos=True)
    return Work(RANDOM, prompts, asked)


def measure(llm: LLM, work: Work, repeats: int, forget: bool) -> tuple[Tally, Tally]:
    """Measure plain decoding and decoding with drafts, one request at a time. `forget` clears what the drafter has
    learnt from earlier requests."""
    engine = llm.llm_engine
    drafting = engine.extension(SpeculativeDecoding)
    ahead = engine.config.scheduler.runs_ahead(torch.device(engine.config.model.device))
    ahead_drafting = engine.loop.runs_ahead
    with_drafts = list(engine.extensions)
    without = [extension for extension in with_drafts if extension is not drafting]
    plain, spec = Tally(), Tally()
    for prompt in work.prompts:
        best: dict[int, tuple[float, float]] = {}
        for turn in range(repeats + 1):
            for tally in (plain, spec) if turn % 2 else (spec, plain):
                engine.extensions[:] = with_drafts if tally is spec else without
                engine.loop.runs_ahead = ahead_drafting if tally is spec else ahead
                if forget and drafting is not None:
                    drafting.speculator.__post_init__()
                before = counts(llm, drafting)
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
                steps, *drafts = (b - a for a, b in zip(before, counts(llm, drafting), strict=True))
                tally.steps += steps - 1
                tally.drafts, tally.drafted, tally.accepted = (
                    total + new
                    for total, new in zip((tally.drafts, tally.drafted, tally.accepted), drafts, strict=True)
                )
        for tally in (plain, spec):
            decode, whole = best[id(tally)]
            tally.decode += decode
            tally.times.append(decode)
            tally.whole += whole
    engine.extensions[:], engine.loop.runs_ahead = with_drafts, ahead_drafting
    return plain, spec


def counts(llm: LLM, drafting: SpeculativeDecoding | None) -> Sequence[int]:
    drafts = DraftCounts() if drafting is None else drafting.counts
    return llm.llm_engine.metrics.num_steps, drafts.drafts, drafts.draft_tokens, drafts.accepted_tokens


def row(work: Work, method: str, plain: Tally, spec: Tally, compared: bool) -> str:
    if compared and spec.answers != plain.answers:
        raise RuntimeError(f"{work.name}: {method} changed answers")
    cells = [
        f"{len(work.prompts)} x {work.name}",
        method,
        f"{plain.steps / max(1, spec.steps):.2f}",
        f"{spec.accepted / max(1, spec.drafted):.0%}",
        f"{spec.drafts / max(1, spec.steps):.0%}",
        f"{plain.decode / max(1e-9, spec.decode):.2f}x",
        f"{statistics.median(a / max(1e-9, b) for a, b in zip(plain.times, spec.times, strict=True)):.3f}x",
        f"{plain.whole / spec.whole:.2f}x",
    ]
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
