"""Importing BM25 has no side effects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.cpu_only
def test_a_jax_that_is_installed_does_not_take_the_gpu(tmp_path: Path) -> None:
    """bm25s runs a JAX function when it is imported, and JAX takes most of a GPU's memory unless told not to."""
    seen = tmp_path / "seen"
    package = tmp_path / "jax"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "lax.py").write_text(
        "import os, pathlib\n"
        "def top_k(values, k):\n"
        f"    pathlib.Path({str(seen)!r}).write_text(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE', 'unset'))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(ROOT)])
    subprocess.run([sys.executable, "-c", "import vllm_blend.pipeline.bm25"], env=environment, check=True, timeout=600)
    assert seen.read_text() == "false"
