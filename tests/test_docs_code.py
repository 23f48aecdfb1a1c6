"""The Python blocks of the pages run as they stand there, and every block is run by some test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from vllm_blend.entrypoints.serve import parse

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
# What each page's Python blocks, which make one program, print among other things.
PRINTED = {
    "async_llm.md": ["lenses"],
    "chunks.md": ["lenses", "BlendStats("],
    "offline.md": ["lenses"],
    "structured_outputs.md": [],
}
# Blocks that other tests run, or that cannot run as they stand.
ELSEWHERE = {
    ("README.md", "python"): "tests/test_readme.py",
    ("operations.md", "python"): "tests/test_docs.py",
    ("operations.md", "yaml"): "tests/test_docs.py",
    ("store_format.md", "python"): "tests/test_docs.py",
    ("pipeline.md", "bash"): "tests/pipeline/test_own_data.py",
    ("hooks.md", "python"): "tests/blend/test_seed_hooks.py",  # an outline with `...`; examples/blend_hooks.py is whole
    ("ray.md", "python"): "tests/ray/test_app.py",  # what it serves needs Ray: tests/ray/run.sh starts it
    ("server.md", "python"): "tests/entrypoints/openai",  # needs a server and the client, which those start
    ("server.md", "yaml"): "tests/test_docs_code.py",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def test_every_block_is_run_by_a_test() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = {(page.name, language) for page in pages for language, _ in blocks(page)}
    assert found == {*ELSEWHERE, *((name, "python") for name in PRINTED)}
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).exists()] == []


@pytest.mark.cpu_only
def test_the_blocks_of_every_page_run() -> None:
    """One process imports the package once, and runs each page as a program that knows nothing of the others."""
    programs = {
        name: "\n".join(text for language, text in blocks(ROOT / "docs" / name) if language == "python")
        for name in PRINTED
    }
    runner = (
        "for name, code in PROGRAMS.items():\n"
        "    print(f'\\n== {name}', flush=True)\n"
        "    exec(compile(code, name, 'exec'), {'__name__': '__main__'})\n"
    )
    command = [sys.executable, "-c", f"PROGRAMS = {programs!r}\n{runner}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = dict(part.split("\n", 1) for part in re.split(r"(?m)^== ", done.stdout)[1:])
    assert printed.keys() == PRINTED.keys()
    missing = [(name, text) for name, texts in PRINTED.items() for text in texts if text not in printed[name]]
    assert missing == []


def test_the_servers_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [text] = [text for language, text in blocks(ROOT / "docs" / "server.md") if language == "yaml"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.yaml").write_text(text)
    (tmp_path / "keys.txt").write_text("key\n")
    engine_args, options = parse(["--config", "server.yaml"])
    given = yaml.safe_load(text)
    assert engine_args.model == given["model"] and engine_args.max_model_len == given["max-model-len"]
    assert options.max_queued_requests == given["max-queued-requests"]
