"""The scripts that test on a GPU: nothing that they were to run is left out without a word."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
PROGRAM = """#!/bin/bash
case "$*" in
*combinations*) echo "cuda bfloat16" ;;
*--collect-only*) echo "tests/ops_gpu/test_norm.py::test_rms_norm[8]" ;;
*--tool*) while [[ $1 != "$0" ]]; do shift; done; exec "$@" ;;
*FAILS*) echo "1 failed in 1s"; exit 1 ;;
*) echo "1 passed in 1s" ;;
esac
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Stands for both Python and compute-sanitizer, and passes every test."""
    path = tmp_path / "program"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path


def run(script: str, program: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": str(program), "SANITIZER": str(program), "ONLY": ""} | variables
    command = ["bash", str(SCRIPTS / script)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("script", "good", "parts"),
    [("test_gpu.sh", "passed", ["cuda bfloat16 tests/engine", "gpu"]), ("sanitize_gpu.sh", "clean", ["test_rms_norm"])],
)
def test_each_part_gets_a_line(script: str, good: str, parts: list[str], program: Path) -> None:
    done = run(script, program)
    assert done.returncode == 0, done.stdout + done.stderr
    for part in parts:
        assert any(line.startswith(good) and part in line for line in done.stdout.splitlines()), done.stdout
    program.write_text(PROGRAM.replace("FAILS", parts[0].split()[-1]))
    done = run(script, program)
    assert done.returncode != 0 and "FAILED" in done.stdout


@pytest.mark.parametrize("script", ["test_gpu.sh", "sanitize_gpu.sh"])
def test_a_word_that_no_part_contains_is_an_error(script: str, program: Path) -> None:
    done = run(script, program, ONLY="no-such-part")
    assert done.returncode != 0 and "ONLY=no-such-part" in done.stderr


@pytest.mark.parametrize(
    ("tool", "kernel", "tests", "good"),
    [
        ("racecheck", "nvjet_sm90_tst_64x64", "1 passed", True),
        ("racecheck", "vb::decode_kernel", "1 passed", False),
        ("racecheck", "nvjet_sm90_tst_64x64", "1 failed, 1 passed", False),
        ("memcheck", "nvjet_sm90_tst_64x64", "1 passed", False),
    ],
)
def test_races_within_cublas_are_named_and_do_not_count(
    tool: str, kernel: str, tests: str, good: bool, program: Path
) -> None:
    races = [f"========= Error: Race reported between Read access at {name}+0xa00" for name in (kernel, "nvjet_2")]
    said = "; ".join(f'echo "{line}"' for line in [*races, f"{tests} in 1s"])
    program.write_text(PROGRAM.replace("*--tool*) ", f'*"--tool {tool}"*) {said}; exit 9 ;;\n*--tool*) '))
    done = run("sanitize_gpu.sh", program)
    assert (done.returncode == 0) == good, done.stdout
    assert (f"clean but for cuBLAS  {tool}" in done.stdout) == good


def test_a_missing_sanitizer_is_one_error(program: Path) -> None:
    done = run("sanitize_gpu.sh", program, SANITIZER="no-such-sanitizer")
    assert done.returncode != 0 and done.stdout == ""
    assert "no-such-sanitizer was not found" in done.stderr and "SANITIZER" in done.stderr
