"""Measure the host time of a decode step: all of it that is not the model, in CPU time of the processes that run it.

    OMP_NUM_THREADS=1 python -m benchmarks.host_time --output host_time.json
    OMP_NUM_THREADS=1 python -m benchmarks.host_time --against ../before --output host_time.json

Many requests decode at once, by `LLM.generate` and as `AsyncLLM` streams of DELTA outputs. A stand-in takes the place
of the device (benchmarks/host/host_stand_in.py): no layer is computed, and tokens come from a table. What is left is
the scheduler, the arrays of a step as CUDA graphs read them, sampling state, reading tokens, text, outputs and
messages, with a step queued ahead as on a GPU. Of a GPU's own cost (launches, pinned copies, events) nothing is in it.
Offline the device takes no time; for streams it takes `--device-ms` a step, during which the host is idle, so that
every token reaches its stream in an output of its own.

With `--against`, another checkout of this project is measured by the same files, in turns (this, other, other, this),
each turn in processes of its own. A ratio is the other's median over this one's: above 1, this checkout needs less.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoTokenizer

from benchmarks.side.report import compared, drift, flat

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "host"
MODEL = ROOT / "inputs" / "demo-model"
LABELS = {
    "offline_cpu": "`LLM.generate`: CPU ms a step",
    "offline_wall": "`LLM.generate`: wall ms a step",
    "stream_engine_cpu": "streams: CPU ms a step of the engine's process",
    "stream_server_cpu": "streams: CPU ms a step of the server's process",
    "stream_wall": "streams: wall ms a step, the device's time included",
    "stream_tokens_an_output": "streams: tokens of an output",
}
THIS, OTHER = "this", "other"


def text_token_ids() -> list[int]:
    """Return token ids as texts have them, so that every token makes text at once."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    samples = json.loads((ROOT / "inputs" / "musique_s.json").read_text(encoding="utf-8"))[:20]
    texts = [passage["text"] for sample in samples for passage in sample["ctxs"]]
    return [token for text in texts for token in tokenizer.encode(text, add_special_tokens=False)]


def run_turn(checkout: Path, spec: dict[str, Any]) -> dict[str, list[float]]:
    """Return what one process of a checkout measures. Raises RuntimeError with its last lines if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        spec_file = Path(folder, "spec.json")
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        reading, writing = os.pipe()
        process = subprocess.run(
            [sys.executable, str(FOLDER / "worker.py"), str(spec_file), str(writing)],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": f"{checkout}:{FOLDER}", "HF_HUB_OFFLINE": "1"},
            pass_fds=[writing],
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(writing)
        with os.fdopen(reading) as answers:
            found = answers.read()
    if process.returncode:
        raise RuntimeError(f"a turn of {checkout} failed: {process.stderr[-2000:]}")
    measured: dict[str, list[float]] = json.loads(found)
    return measured


def measure(args: argparse.Namespace) -> dict[str, list[dict[str, list[float]]]]:
    """Return the samples of every turn, by side."""
    sides = {THIS: ROOT} | ({OTHER: args.against} if args.against else {})
    spec = {name: getattr(args, name) for name in ("requests", "prompt", "tokens", "repeats", "seed", "device_ms")}
    spec |= {"model": str(MODEL), "modes": args.modes, "params": args.params, "token_ids": text_token_ids()}
    turns: dict[str, list[dict[str, list[float]]]] = {side: [] for side in sides}
    for turn in range(args.turns):
        for side in sides if turn % 2 == 0 else reversed(sides):
            turns[side].append(run_turn(sides[side], spec))
            print(f"turn {turn + 1} of {side} is done", file=sys.stderr, flush=True)
    return turns


def table(turns: dict[str, list[dict[str, list[float]]]]) -> list[str]:
    """Return the lines of the table."""
    both = OTHER in turns
    head = ["", "this", *(["other", "other over this", "drift"] if both else ["least", "most"])]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for name, label in LABELS.items():
        own = [turn[name] for turn in turns[THIS] if name in turn]
        if not own:
            continue
        cells = [label, f"{median(flat(own)):.2f}"]
        if both:
            other = [turn[name] for turn in turns[OTHER]]
            cells += [f"{median(flat(other)):.2f}", compared(own, other), drift(own, other)]
        else:
            cells += [f"{min(flat(own)):.2f}", f"{max(flat(own)):.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout of this project")
    parser.add_argument("--requests", type=int, default=256, help="that decode at once")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of every prompt")
    parser.add_argument("--tokens", type=int, default=200, help="of every answer")
    parser.add_argument("--repeats", type=int, default=5, help="runs of a turn, each of which gives a sample")
    parser.add_argument("--turns", type=int, default=2, help="of each side; every second round is reversed")
    parser.add_argument("--modes", nargs="+", choices=("offline", "streaming"), default=["offline", "streaming"])
    parser.add_argument("--params", type=json.loads, default={}, metavar="JSON", help="fields of SamplingParams")
    parser.add_argument("--device-ms", type=float, default=30.0, help="that the device takes for a step of streams")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file for all samples")
    args = parser.parse_args(argv)
    for name in ("requests", "prompt", "repeats", "turns"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} must be at least 1")
    if args.tokens < 32:
        parser.error(f"--tokens {args.tokens} must be at least 32: steps at both ends of a run are left out")
    if args.against and not (args.against / "vllm_blend" / "__init__.py").is_file():
        parser.error(f"--against {args.against}: there is no vllm_blend/__init__.py in it; give a checkout")
    args.against = args.against and args.against.resolve()
    turns = measure(args)
    print("\n".join(table(turns)))
    if args.output:
        settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        settings |= {"against": args.against and args.against.name, "output": args.output.name}
        args.output.write_text(json.dumps({"settings": settings, "turns": turns}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
