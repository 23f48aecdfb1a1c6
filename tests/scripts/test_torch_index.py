"""The scripts install CPU builds of torch without a GPU, or from pip's sources if there is no such index."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.stand_ins import needs_compiler, write_driver, write_wheel

pytestmark = pytest.mark.cpu_only

RELEASE = "7.8.9"


class Index:
    """A package index with one wheel of torch, and what was asked of it."""

    def __init__(self, folder: Path, version: str) -> None:
        self.requests: list[str] = []
        pages = folder / "torch"
        pages.mkdir(parents=True)
        wheel = write_wheel(pages, "torch", version)
        (pages / "index.html").write_text(f'<a href="{wheel.name.replace("+", "%2B")}">{wheel.name}</a>')
        requests = self.requests

        class Handler(SimpleHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                requests.append(self.path)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def indexes(tmp_path: Path) -> Iterator[tuple[Index, Index]]:
    """PyPI's stand-in, and that of PyTorch's index of CPU builds."""
    both = Index(tmp_path / "pypi", RELEASE), Index(tmp_path / "cpu", f"{RELEASE}+cpu")
    yield both
    for index in both:
        index.server.shutdown()
        index.server.server_close()


@pytest.fixture
def driver(tmp_path: Path) -> str:
    """A folder with a CUDA driver that sees one GPU."""
    return str(write_driver(tmp_path / "driver", gpus=1))


def choose(index: str, release: str = RELEASE, **variables: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "scripts/torch_index.py", release],
        cwd=ROOT,
        env=os.environ | {"TORCH_INDEX": index, "no_proxy": "*"} | variables,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@needs_compiler
def test_cpu_builds_are_taken_unless_there_is_a_gpu(indexes: tuple[Index, Index], driver: str) -> None:
    _, cpu = indexes
    assert choose(cpu.url, LD_LIBRARY_PATH=driver) == ("", "") and cpu.requests == []
    assert choose(cpu.url) == (cpu.url, "") and cpu.requests == ["/torch/"]
    assert choose("") == ("", "")


@pytest.mark.parametrize("fault", ["unreachable", "silent", "another release", "no index"])
def test_an_index_that_does_not_serve_is_one_line_of_text(fault: str, indexes: tuple[Index, Index]) -> None:
    _, cpu = indexes
    url = {"unreachable": "http://127.0.0.1:9", "no index": f"{cpu.url}/torch"}.get(fault, cpu.url)
    release = "7.8.10" if fault == "another release" else RELEASE
    if fault == "silent":
        cpu.server.shutdown()  # connections are accepted, and nothing answers
    found, note = choose(url, release)
    assert (
        found == "" and note.count("\n") == 1 and note.startswith(f"note: no CPU build of torch {release} at {url} (")
    )
    assert "no answer in 5 s" in note or fault != "silent"


def test_pip_takes_the_cpu_build(indexes: tuple[Index, Index], tmp_path: Path) -> None:
    """Run the installation with real pip, which downloads instead of installing."""
    pypi, cpu = indexes
    for name in ("scripts", "csrc", "vllm_blend/ops"):
        shutil.copytree(ROOT / name, tmp_path / name)
    (tmp_path / "setup.py").touch()
    (tmp_path / "requirements.txt").write_text(f"torch=={RELEASE}\n")
    python = tmp_path / "python"
    python.write_text(f"""#!/usr/bin/env bash
case "$*" in
  "-m venv"*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
  *editable* | *-r*) ;;
  "-m pip install"*)
    for argument in "${{@:4}}"; do [[ "$argument" == --*compile ]] || kept+=("$argument"); done
    exec {sys.executable} -m pip download --no-deps --dest "{tmp_path}/got" "${{kept[@]}}" ;;
  *) exec {sys.executable} "$@" ;;
esac
""")
    python.chmod(0o755)
    variables = {"PIP_INDEX_URL": pypi.url, "PIP_FIND_LINKS": "", "no_proxy": "*", "PYTHON": str(python)}
    variables["PIP_CONFIG_FILE"] = os.devnull  # a machine's own constraints know no such release
    for index, wheel in ((cpu.url, f"torch-{RELEASE}+cpu-"), ("", f"torch-{RELEASE}-")):
        shutil.rmtree(tmp_path / "venv", ignore_errors=True)
        shutil.rmtree(tmp_path / "got", ignore_errors=True)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", f"source scripts/environment.sh; install_into {tmp_path}/venv"],
            cwd=tmp_path,
            env=os.environ | variables | {"TORCH_INDEX": index},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        [got] = (tmp_path / "got").iterdir()
        assert got.name.startswith(wheel)
