"""The examples run as they are, and what they print is what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, *paths: Path, **variables: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name)],
        cwd="/",
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_chunked_prompt() -> None:
    first, reordered, whole, asked = run("chunked_prompt.py")
    counts = [
        [int(n) for n in re.findall(r"(\d+) (?:prompt tokens|of them)", line)] for line in (first, reordered, whole)
    ]
    assert [len(pair) for pair in counts] == [2, 2, 2]
    assert counts[1][0] == counts[2][0] < counts[0][0] and counts[1][1] < counts[2][1] / 2
    assert whole.endswith(": " + asked.rpartition("? ")[2])


def test_blend_hooks() -> None:
    *blends, full, _ = run("blend_hooks.py")
    computed = {line.split(":")[0]: int(re.findall(r": (\d+) of", line)[0]) for line in blends}
    total = int(re.findall(r"of (\d+) tokens", blends[0])[0])
    assert list(computed.values()) == [0, int(0.16 * total), int(0.16 * total), total]
    assert blends[-1].rpartition(":")[2] == full.rpartition(":")[2]  # everything recomputed is full prefill


def test_chunk_api() -> None:
    first, reordered, exactly, another, retained, deleted, left = run("chunk_api.py")
    counts = [[int(n) for n in re.findall(r"(\d+) of (\d+) tokens", line)[0]] for line in (first, reordered, exactly)]
    assert counts[0] == counts[1] and counts[1][1] == counts[2][1] == counts[2][0] > 4 * counts[0][0]
    computed, total = (int(n) for n in re.findall(r"(\d+) of (\d+) tokens", another)[0])
    assert total > 10 * computed
    assert first.endswith("boats") and exactly.endswith("boats")
    assert "type OUTPUT" in retained and "deferred: True" in deleted and left.endswith("in 12 chunks")


def test_kv_blend(tmp_path: Path) -> None:
    (tmp_path / "lmcache_vllm").symlink_to(ROOT / "vllm_blend/compat/lmcache_vllm")
    lines = run("kv_blend.py", tmp_path, LMCACHE_CONFIG_FILE=str(ROOT / "examples/kv_blend.yaml"))
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
