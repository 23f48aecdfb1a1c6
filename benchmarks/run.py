"""Run the benchmarks of this machine one after another, and write what they say with what they ran on.

    python -m benchmarks.run cpu --output results/benchmarks
    python -m benchmarks.run gpu --only engine chunks --output results/benchmarks
    python -m benchmarks.run gpu --vllm-python ../vllm-env/bin/python
    python -m benchmarks.run cpu --kvpress-python ../kvpress-env/bin/python

writes OUTPUT.json (hardware, versions, commit, every command with its output, its duration and the single measurements
behind its medians, where it records them), OUTPUT.md (the same to read, without those) and OUTPUT.png (these single
measurements; it needs matplotlib, `--no-png` does without). Each benchmark is a module
of its own, which its `--help` explains; nothing else should run beside them. One that fails is in both files with the
end of its error, the others go on, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.sample_picture import draw
from benchmarks.samples import VARIABLE, read

ROOT = Path(__file__).resolve().parents[1]
SIDE_BY_SIDE, COMPRESSION = "side_by_side", "compression"
# Peers that need an environment of their own -> the benchmark that gets the interpreter.
INTERPRETERS = {"vllm": SIDE_BY_SIDE, "kvpress": COMPRESSION}
BENCHMARKS = {  # device -> name -> what `python -m` runs
    "cpu": {
        "engine": "benchmarks.engine_cpu",
        "chunks": "benchmarks.chunks",
        "disk": "benchmarks.disk_loading",
        COMPRESSION: "benchmarks.kvc_quality --datasets musique_s --samples 12 --metrics kv_compress keydiff random",
        "quality": "benchmarks.real_text inputs/demo-model --data inputs/musique_s.json --quick --output {folder}/t",
        "side_by_side": "benchmarks.side_by_side --profile cpu --output {output}_side_by_side",
    },
    "gpu": {
        "engine": "benchmarks.engine_gpu",
        "host": "benchmarks.engine_gpu --only blend --chunk-device cpu",
        "chunks": "benchmarks.chunks --shape 7b --tokens 4096 8192",
        "rules": "benchmarks.first_token",
        "offload": "benchmarks.offload --device cuda --shape mistral-7b",
        "cascade": "benchmarks.cascade_gpu",
        "side_by_side": "benchmarks.side_by_side --output {output}_side_by_side",
    },
}
# Other people's engines and tools in this environment -> the benchmarks, by device, that time them in the same run.
PEERS: dict[str, dict[str, tuple[str, ...]]] = {"transformers": {"cpu": ("engine", SIDE_BY_SIDE)}}
PACKAGES = ("vllm-blend", "torch", "transformers", "numpy", "flashinfer-python", "xformers")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = "; ".join(f"{device}: {', '.join(commands)}" for device, commands in sorted(BENCHMARKS.items()))
    parser.epilog = f"The names: {named}. A new checkout begins with: python -m benchmarks.run cpu --only engine"
    parser.add_argument("device", nargs="?", choices=sorted(BENCHMARKS), help="which machine's benchmarks to run")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of them (default: all)")
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks"), help="files without their suffix")
    for peer, benchmark in INTERPRETERS.items():
        parser.add_argument(
            f"--{peer}-python", type=Path, metavar="PYTHON", help=f"for {benchmark}: one that has {peer}"
        )
    parser.add_argument("--no-png", action="store_true", help="draw no picture, which needs matplotlib")
    args = parser.parse_args(argv)
    if args.device is None:
        parser.print_help(sys.stderr)
        print(f"\n{parser.prog}: say which device: {' or '.join(sorted(BENCHMARKS))}", file=sys.stderr)
        return 2
    known = BENCHMARKS[args.device]
    names = args.only or list(known)
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"--only {' '.join(unknown)}: on {args.device} there are {', '.join(known)}")
    if args.device == "gpu" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: run `cpu`, or look at nvidia-smi and at torch's build")
    given = {peer: python for peer in INTERPRETERS if (python := getattr(args, f"{peer}_python")) is not None}
    for peer in given:
        if INTERPRETERS[peer] not in known:
            parser.error(
                f"--{peer}-python is for {INTERPRETERS[peer]}, which does not run on {args.device}: leave it out"
            )
        if INTERPRETERS[peer] not in names:
            parser.error(
                f"--{peer}-python is for {INTERPRETERS[peer]} alone: name it in --only, or leave one of the two out"
            )
    if not args.no_png and find_spec("matplotlib") is None:
        parser.error('the picture needs matplotlib: pip install -e ".[bench]", or pass --no-png')
    args.output.parent.mkdir(parents=True, exist_ok=True)
    about, runs = describe(args.device), []
    about["peers"] = peers(args.device, names, given)
    for name in names:
        print(f"== {name}", flush=True)
        own = (peer for peer in given if INTERPRETERS[peer] == name)
        more = [word for peer in own for word in (f"--{peer}-python", str(given[peer].absolute()))]
        runs.append(run(name, known[name], args.output.absolute(), more))
        report = {"about": about, "runs": runs}  # written after each: a run that is interrupted keeps what it has
        args.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text(render(report), encoding="utf-8")
        if not args.no_png:
            draw(report, args.output.with_suffix(".png"))
    return int(any(each["status"] for each in runs))


def run(name: str, command: str, output: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """Run one benchmark and show its output while it comes."""
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder, "samples.jsonl")
        words = [*(word.format(folder=folder, output=output) for word in shlex.split(command)), *more]
        start, lines = time.perf_counter(), []
        errors = Path(folder, "errors")
        with errors.open("w") as stderr:
            options: dict[str, Any] = {"cwd": ROOT, "env": os.environ | {VARIABLE: str(samples)}, "text": True}
            process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, stderr=stderr, **options)
            assert process.stdout is not None
            for line in process.stdout:
                lines.append(line.rstrip())
                print(lines[-1], flush=True)
        status = process.wait()
        if status:
            lines += errors.read_text(errors="replace").splitlines()[-20:]
        return {
            "name": name,
            "command": shlex.join(
                ["python", "-m", *shlex.split(command.format(folder="FOLDER", output="OUTPUT")), *more]
            ),
            "status": status,
            "seconds": round(time.perf_counter() - start, 1),
            "output": [
                line.replace(folder, "FOLDER").replace(str(output), "OUTPUT").replace(str(ROOT), ".") for line in lines
            ],
            "samples": read(samples),
        }


def describe(device: str) -> dict[str, Any]:
    """Return what the numbers are of: hardware, versions, and the commit with whether files differ from it."""
    about: dict[str, Any] = {
        "date": date.today().isoformat(),
        "device": device,
        "processor": processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": [round(load, 1) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "commit": git("rev-parse", "HEAD"),
        "changed files": git("status", "--porcelain", "--untracked-files=no").count("\n"),
        "versions": {name: found for name in PACKAGES if (found := installed(name))},
    }
    if device == "gpu":
        about["gpu"] = torch.cuda.get_device_name()
        about["versions"]["CUDA"] = torch.version.cuda
    return about


def peers(device: str, names: Sequence[str], given: Mapping[str, Path]) -> dict[str, str]:
    """Return what this run says of each peer: where it is compared, or that it is absent or not compared. `given` are
    the interpreters of those that have an environment of their own."""
    said = {}
    for peer, benchmark in INTERPRETERS.items():  # not looked for here, where the name `vllm` may be our alias
        absent = f"absent: no --{peer}-python was given"
        said[peer] = f"compared in {benchmark}, which says its version" if peer in given else absent
    for peer, timed_by in PEERS.items():
        timing = [name for name in timed_by.get(device, ()) if name in names]
        if (found := installed(peer)) is None:
            said[peer] = "absent: not installed here, so nothing is compared with it"
        elif timing:
            said[peer] = f"{found}, timed in {', '.join(timing)}"
        else:
            said[peer] = f"{found} is installed, but no benchmark of this run times it"
    return said


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def processor() -> str:
    """Return the processor's name, where Linux knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def git(*arguments: str) -> str:
    """Return what git says of the checkout; "" outside one."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout if arguments[0] == "status" else done.stdout.strip()


def render(report: dict[str, Any]) -> str:
    """Return the report as Markdown."""
    about = report["about"]
    facts = [f"| {name} | {value} |" for name, value in about.items() if name not in ("versions", "peers")]
    facts += [f"| {name} | {value} |" for name, value in about["versions"].items()]
    lines = [f"# Benchmarks on {about.get('gpu', about['processor'])}", "", "| | |", "|---|---|", *facts]
    lines += ["", "## Peers", "", *(f"- {name}: {said}" for name, said in about.get("peers", {}).items())]
    for each in report["runs"]:
        failed = f" **It failed with status {each['status']}.**" if each["status"] else ""
        lines += ["", f"## {each['name']}", "", f"`{each['command']}`, {each['seconds']} s.{failed}", ""]
        tables = not each["status"] and any(line.startswith("|---") for line in each["output"])
        lines += each["output"] if tables else ["```text", *each["output"], "```"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
