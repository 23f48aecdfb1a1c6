"""Time the demo model with the compiled CPU kernels and without them, in turns.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_kernels --pairs 6 --output results/cpu_kernels

Each pair is two processes, one of them with VLLM_BLEND_DISABLE_KERNELS=1, which has every operation run in plain torch.
Each process takes the CPU time of full prefills of a prompt, and of the steps of greedy decoding behind it, by one
request. What counts is the ratio of the medians of a pair, as the machine may be doing other work. The samples go into
OUTPUT.json, the table into OUTPUT.md. It needs a build with the kernels, and one thread: others take time by waiting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_cpu import blending_ids, decode_steps, generate, greedy, long_prompts
from benchmarks.run import processor
from vllm_blend import LLM
from vllm_blend.ops.bindings import DISABLE_VARIABLE, cpu_kernels

WORKS = {"prefill": "full prefill", "decode": "a decode step"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inputs/demo-model")
    parser.add_argument("--dataset", default="inputs/musique_s.json")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=5, help="prefills of each process")
    parser.add_argument("--prompt-tokens", type=int, default=900, help="at most so many")
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path, help="files without their suffix")
    parser.add_argument("--one-side", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one_side:
        print(json.dumps(time_one_side(args)))
        return
    words = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in ("model", "dataset", "repeats")]
    words += [f"--prompt-tokens={args.prompt_tokens}", f"--decode-tokens={args.decode_tokens}", "--one-side"]
    pairs: list[dict[str, Any]] = []
    for number in range(args.pairs):
        pair = {}
        for side in ("with", "without") if number % 2 == 0 else ("without", "with"):
            environment = os.environ | ({DISABLE_VARIABLE: "1"} if side == "without" else {})
            command = [sys.executable, "-m", "benchmarks.cpu_kernels", *words]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            pair[side] = json.loads(done.stdout.splitlines()[-1])
        pairs.append(pair)
        print(
            f"pair {number + 1}: " + ", ".join(f"{WORKS[work]} {ratio(pair, work):.2f}x" for work in WORKS), flush=True
        )
    kernels, load = cpu_kernels(), os.getloadavg()[0]
    about = {"date": date.today().isoformat(), "processor": processor(), "isa": kernels.isa, "load": round(load, 1)}
    about |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    found = {"about": about, "pairs": pairs}
    print(render(found))
    if args.output:
        args.output.with_suffix(".json").write_text(json.dumps(found) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text(render(found), encoding="utf-8")


def time_one_side(args: argparse.Namespace) -> dict[str, Any]:
    """Return the prompt's tokens, and the seconds of every prefill and of every decode step."""
    with LLM(args.model, device="cpu", dtype="float32", enable_prefix_caching=False) as llm:
        ids = blending_ids(long_prompts(args.dataset, llm, args.prompt_tokens, 1)[0])
        prefills = []
        for _ in range(args.repeats + 1):
            start = time.process_time()
            generate(llm, [ids], greedy(1))
            prefills.append(round(time.process_time() - start, 6))
        steps = [round(seconds, 6) for seconds in decode_steps(llm, [ids], args.decode_tokens, time.process_time)]
    return {"tokens": len(ids), "prefill": prefills[1:], "decode": steps}  # the first one warms up


def ratio(pair: dict[str, Any], work: str) -> float:
    """Return how many times as long the work takes without the kernels."""
    return float(statistics.median(pair["without"][work]) / statistics.median(pair["with"][work]))


def render(found: dict[str, Any]) -> str:
    """Return the page: the medians and the ratio of every pair."""
    about, pairs = found["about"], found["pairs"]
    lines = [
        "# The CPU kernels against plain torch",
        "",
        f"`python -m benchmarks.cpu_kernels --pairs {len(pairs)}`, {about['date']}, {about['processor']}, kernels for "
        f"{about['isa']}, {about['threads']} thread, torch {about['torch']}, load {about['load']} at the end: other "
        "jobs used the machine. The demo model in float32, one request with a prompt of "
        f"{pairs[0]['with']['tokens']} tokens.",
        "",
        "| pair | work | with kernels, CPU ms | without, CPU ms | without / with |",
        "|---|---|---|---|---|",
    ]
    for number, pair in enumerate(pairs):
        for work, name in WORKS.items():
            own, plain = (1000 * statistics.median(pair[side][work]) for side in ("with", "without"))
            lines.append(f"| {number + 1} | {name} | {own:.1f} | {plain:.1f} | {ratio(pair, work):.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
