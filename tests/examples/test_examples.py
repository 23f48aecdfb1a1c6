"""The examples run as they are, and what they print is what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


EXAMPLES = ("chunked_prompt.py", "blend_hooks.py", "chunk_api.py", "kv_blend.py")
RUNNER = """
import gc, os, runpy, sys
for path in sys.argv[1:]:
    print(f"== {os.path.basename(path)}", flush=True)
    sys.argv = [path]
    runpy.run_path(path, run_name="__main__")
    gc.collect()
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what the examples print, by name. One process imports the package once, and runs each as a program that
    knows nothing of the others."""
    site = tmp_path_factory.mktemp("site")
    (site / "lmcache_vllm").symlink_to(ROOT / "vllm_blend/compat/lmcache_vllm")
    variables = {"PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "LMCACHE_CONFIG_FILE": str(ROOT / "examples/kv_blend.yaml")}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *(str(ROOT / "examples" / name) for name in EXAMPLES)],
        cwd="/",
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("== "):
            lines[line.removeprefix("== ")] = []
        else:
            lines[next(reversed(lines))].append(line)
    return lines


def test_chunked_prompt(printed: dict[str, list[str]]) -> None:
    first, reordered, whole, asked = printed["chunked_prompt.py"]
    counts = [
        [int(n) for n in re.findall(r"(\d+) (?:prompt tokens|of them)", line)] for line in (first, reordered, whole)
    ]
    assert [len(pair) for pair in counts] == [2, 2, 2]
    assert counts[1][0] == counts[2][0] < counts[0][0] and counts[1][1] < counts[2][1] / 2
    assert whole.endswith(": " + asked.rpartition("? ")[2])


def test_blend_hooks(printed: dict[str, list[str]]) -> None:
    *blends, full, _ = printed["blend_hooks.py"]
    computed = {line.split(":")[0]: int(re.findall(r": (\d+) of", line)[0]) for line in blends}
    total = int(re.findall(r"of (\d+) tokens", blends[0])[0])
    assert list(computed.values()) == [0, int(0.16 * total), int(0.16 * total), total]
    assert blends[-1].rpartition(":")[2] == full.rpartition(":")[2]  # everything recomputed is full prefill


def test_chunk_api(printed: dict[str, list[str]]) -> None:
    first, reordered, exactly, another, retained, deleted, left = printed["chunk_api.py"]
    counts = [[int(n) for n in re.findall(r"(\d+) of (\d+) tokens", line)[0]] for line in (first, reordered, exactly)]
    assert counts[0] == counts[1] and counts[1][1] == counts[2][1] == counts[2][0] > 4 * counts[0][0]
    computed, total = (int(n) for n in re.findall(r"(\d+) of (\d+) tokens", another)[0])
    assert total > 10 * computed
    assert first.endswith("boats") and exactly.endswith("boats")
    assert "type OUTPUT" in retained and "deferred: True" in deleted and left.endswith("in 12 chunks")


def test_kv_blend(printed: dict[str, list[str]]) -> None:
    lines = printed["kv_blend.py"]
    assert [line.rpartition("ms: ")[2] for line in lines] == ["lenses", "lenses", "Brianfour", "lenses"]
    for line in lines:
        reused, total = (int(n) for n in re.findall(r"(\d+) of (\d+) tokens", line)[0])
        assert reused > 0.7 * total


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.py")), ids=lambda path: path.name)
def test_every_example_is_run(path: Path) -> None:
    """Here, on a server of the tests, or beside other people's packages."""
    places = [
        Path(__file__),
        *(ROOT / "tests").glob("entrypoints/openai/test_*.py"),
        *ROOT.glob("tests/integrations/*.py"),
    ]
    named = (f'"{path.name}"', f'"examples/{path.name}"')
    assert any(name in place.read_text() for place in places for name in named)
