"""Run the benchmarks of this machine one after another, and write what they say with what they ran on.

    python -m benchmarks.run cpu --output results/benchmarks
    python -m benchmarks.run gpu --only engine chunks --output results/benchmarks

writes OUTPUT.json (hardware, versions, commit, every command with its output, its duration and the single measurements
behind its medians, where it records them) and OUTPUT.md (the same to read, without those). Each benchmark is a module
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
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.samples import VARIABLE, read

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = {  # device -> name -> what `python -m` runs
    "cpu": {
        "engine": "benchmarks.engine_cpu",
        "chunks": "benchmarks.chunks",
        "disk": "benchmarks.disk_loading",
        "compression": "benchmarks.kvc_quality --datasets musique_s --samples 12 --metrics kv_compress keydiff random",
        "quality": "benchmarks.quality --quick --no-picture --output {folder}/quality",
    },
    "gpu": {
        "engine": "benchmarks.engine_gpu",
        "host": "benchmarks.engine_gpu --only blend --chunk-device cpu",
        "chunks": "benchmarks.chunks --shape 7b --tokens 4096 8192",
        "rules": "benchmarks.first_token",
        "offload": "benchmarks.offload --device cuda --shape mistral-7b",
        "cascade": "benchmarks.cascade_gpu",
    },
}
# Other people's engines and tools -> the benchmarks, by device, that time them in the same run.
PEERS: dict[str, dict[str, tuple[str, ...]]] = {"transformers": {"cpu": ("engine",)}, "vllm": {}, "kvpress": {}}
PACKAGES = ("vllm-blend", "torch", "transformers", "numpy", "flashinfer-python", "xformers")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", choices=sorted(BENCHMARKS))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of them (default: all)")
    parser.add_argument("--output", type=Path, default=Path("results/benchmarks"), help="files without their suffix")
    args = parser.parse_args(argv)
    known = BENCHMARKS[args.device]
    names = args.only or list(known)
    if unknown := sorted(set(names) - set(known)):
        parser.error(f"--only {' '.join(unknown)}: on {args.device} there are {', '.join(known)}")
    if args.device == "gpu" and not torch.cuda.is_available():
        parser.error("torch sees no GPU: run `cpu`, or look at nvidia-smi and at torch's build")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    about, runs = describe(args.device), []
    about["peers"] = peers(args.device, names)
    for name in names:
        print(f"== {name}", flush=True)
        runs.append(run(name, known[name]))
        report = {"about": about, "runs": runs}  # written after each: a run that is interrupted keeps what it has
        args.output.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text(render(report), encoding="utf-8")
    return int(any(each["status"] for each in runs))


def run(name: str, command: str) -> dict[str, Any]:
    """Run one benchmark and show its output while it comes."""
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder, "samples.jsonl")
        words = shlex.split(command.format(folder=folder))
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
            "command": "python -m " + command.format(folder="FOLDER"),
            "status": status,
            "seconds": round(time.perf_counter() - start, 1),
            "output": [line.replace(folder, "FOLDER").replace(str(ROOT), ".") for line in lines],
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


def peers(device: str, names: Sequence[str]) -> dict[str, str]:
    """Return what this run says of each peer: where it is timed, or that it is absent or not compared."""
    said = {}
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
