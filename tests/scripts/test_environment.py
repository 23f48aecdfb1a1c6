"""The scripts that install: they refuse a Python that is too old, and install again only when something changed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bash(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def fake_python(path: Path, body: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_an_old_interpreter_is_refused_with_the_way_out(tmp_path: Path) -> None:
    old = fake_python(tmp_path / "python", 'if [[ $1 == --version ]]; then echo "Python 3.8.1"; else exit 1; fi')
    done = bash("bash scripts/quickstart.sh", PYTHON=old, VENV=str(tmp_path / "venv"))
    assert done.returncode == 1 and not (tmp_path / "venv").exists()
    assert "Python 3.11 or newer" in done.stderr and "Python 3.8.1" in done.stderr and "PYTHON=" in done.stderr


def test_the_oldest_interpreter_is_the_same_everywhere(tmp_path: Path) -> None:
    script = tmp_path / "python"
    for release, accepted in (("(3, 10, 99)", False), ("(3, 11, 0)", True)):
        # The check itself, run with another version.
        fake_python(script, f'shift; exec {sys.executable} -c "import sys; sys.version_info = {release}; $*"')
        done = bash("source scripts/environment.sh; base_python", PYTHON=str(script))
        assert (done.returncode == 0) is accepted
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert project["ruff"]["target-version"] == "py311" and project["mypy"]["python_version"] == "3.11"
    assert 'python_requires=">=3.11"' in (ROOT / "setup.py").read_text()


def test_an_environment_of_an_old_interpreter_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    fake_python(tmp_path / "venv/bin/python", f'echo "$@" >>{log}; [[ $1 == --version ]] && echo "Python 3.10.13"')
    done = bash(f'source scripts/environment.sh; install_into "{tmp_path / "venv"}"', PYTHON=sys.executable)
    assert done.returncode == 1 and f"{tmp_path / 'venv'} has Python 3.10.13" in done.stderr
    assert "remove that folder" in done.stderr and "-m" not in log.read_text()


def test_the_interpreter_that_is_named_is_used_and_else_one_is_found(tmp_path: Path) -> None:
    assert bash("source scripts/environment.sh; base_python", PYTHON=sys.executable).stdout.strip() == sys.executable
    fake_python(tmp_path / "python3", "exit 1")  # too old
    fake_python(tmp_path / "python3.13", f'exec {sys.executable} "$@"')
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert bash("unset PYTHON; source scripts/environment.sh; base_python", PATH=path).stdout == "python3.13\n"


def test_the_quickstart_installs_what_draws_its_timeline(tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = f'echo "$@" >>{log}; if [[ "$*" == "-m venv"* ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi'
    python = fake_python(tmp_path / "python", body)
    results = str(tmp_path / "results")  # stays empty: the stages do nothing either
    bash("bash scripts/quickstart.sh", PYTHON=python, VENV=str(tmp_path / "venv"), RESULTS_DIR=results)
    assert any(line.endswith("--editable .[bench]") for line in log.read_text().splitlines())
    setup = (ROOT / "setup.py").read_text(encoding="utf-8")
    assert '"bench": ["matplotlib"]' in setup


def test_an_environment_is_made_once_and_again_when_something_changed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    # Stands for the interpreter, and for the environment's own one, which it makes.
    body = f'echo "$@" >>{log}; if [[ "$*" == "-m venv"* ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi'
    python = fake_python(tmp_path / "python", body)
    install = f'source scripts/environment.sh; install_into "{tmp_path / "venv"}" dev'
    assert bash(install, PYTHON=python, PYTHONDONTWRITEBYTECODE="").returncode == 0
    commands = log.read_text().splitlines()
    assert any(line == "-m pip install --quiet --no-compile --editable .[dev]" for line in commands)
    torch = next(i for i, line in enumerate(commands) if "torch==" in line)
    assert torch < commands.index("-m pip install --quiet --no-compile -r requirements.txt")
    log.write_text("")
    assert bash(install, PYTHON=python).returncode == 0 and log.read_text() == ""
    (tmp_path / "venv/.installed").write_text("older")
    assert bash(install, PYTHON=python).returncode == 0 and "--editable" in log.read_text()


@pytest.mark.parametrize(("variable", "option"), [("", "--no-compile"), ("1", "--compile")])
def test_pip_compiles_where_python_may_not_write_what_it_compiles(variable: str, option: str, tmp_path: Path) -> None:
    fake_python(tmp_path / "bin/python", 'echo "$@"')
    code = f'source scripts/environment.sh; install_with "{tmp_path}" --requirement "some file"'
    done = bash(code, PYTHONDONTWRITEBYTECODE=variable)
    assert done.stdout == f"-m pip install --quiet {option} --requirement some file\n"


def test_an_installation_that_fails_is_not_taken_for_done(tmp_path: Path) -> None:
    body = 'if [[ "$*" == "-m venv"* ]]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi; [[ "$*" != *editable* ]]'
    python = fake_python(tmp_path / "python", body)
    done = bash(f'source scripts/environment.sh; install_into "{tmp_path / "venv"}"', PYTHON=python)
    assert done.returncode != 0 and not (tmp_path / "venv/.installed").exists()


def test_the_test_script_runs_pytest_of_its_environment(tmp_path: Path) -> None:
    python = fake_python(tmp_path / "venv/bin/python", 'echo "$@"')
    stamp = bash("source scripts/environment.sh; installation_stamp dev").stdout
    (tmp_path / "venv/.installed").write_text(stamp)
    fake_python(tmp_path / "redis-server", "exit 0")  # without one, the tests that start it are left out
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = bash("bash scripts/test.sh tests/x -k y", PYTHON=python, VENV=str(tmp_path / "venv"), PATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["-m pytest -m not gpu tests/x -k y"]
