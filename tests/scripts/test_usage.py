"""Every script explains itself with --help, and refuses what it does not understand before it does any work."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.checkout import ROOT

pytestmark = pytest.mark.cpu_only
SCRIPTS = ROOT / "scripts"
SOURCED = ("common.sh", "environment.sh", "usage.sh")
SHELL = sorted(str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("*.sh") if path.name not in SOURCED)
IMPORTED = ("docs_site.py", "svg.py", "tokenizer.py")  # a hook of MkDocs, and parts of draw_*.py and train.py
PYTHON = sorted(str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("*.py") if path.name not in IMPORTED)
WITHOUT_ARGUMENTS = ("build_cuda.sh", "quickstart.sh", "sanitize_gpu.sh", "test_gpu.sh")


def run(program: str, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    command = [program, str(SCRIPTS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)


@pytest.mark.parametrize("script", SHELL)
def test_shell_scripts_have_help(script: str) -> None:
    done = run("bash", script, "--help")
    assert done.returncode == 0, done.stderr
    header = [line for line in (SCRIPTS / script).read_text().splitlines()[1:4] if line.startswith("# ")]
    assert "usage: " in done.stdout or header[0].removeprefix("# ") in done.stdout
    assert "set -euo" not in done.stdout and "==" not in done.stdout


@pytest.mark.parametrize("script", PYTHON)
def test_python_scripts_have_help(script: str) -> None:
    done = run(sys.executable, script, "--help")
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr
    assert script.rpartition("/")[2] in done.stdout


@pytest.mark.parametrize("script", WITHOUT_ARGUMENTS)
def test_arguments_that_would_be_ignored_are_refused(script: str) -> None:
    done = run("bash", script, "--quick", "now")
    assert done.returncode == 2 and done.stdout == ""
    assert f"error: {script} takes no arguments, got: --quick now" in done.stderr
    assert f"bash scripts/{script}" in done.stderr or script == "build_cuda.sh"


def test_an_option_without_a_value_is_refused() -> None:
    done = run("bash", "serve_ray.sh", "replicas")
    assert done.returncode == 2 and "'replicas' is no NAME=VALUE" in done.stderr and "docs/ray.md" in done.stderr


@pytest.mark.parametrize("script", ["torch_index.py", "run_notebooks.py"])
def test_missing_or_wrong_arguments_get_the_usage(script: str) -> None:
    done = run(sys.executable, script, *(["no-such.ipynb"] if script == "run_notebooks.py" else []))
    assert done.returncode == 2 and done.stderr.startswith("usage: ")
    assert "no-such.ipynb" in done.stderr or "release" in done.stderr
