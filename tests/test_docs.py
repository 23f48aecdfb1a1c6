"""What pages say of the code: docs/architecture.md of files, that they are there and short, docs/server.md of flags,
and docs/operations.md and docs/store_format.md of what their blocks print."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.options_page import options_page

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_blend"
LONG = 350  # lines
# Longer ones, whose docstrings say why.
EXPLAINED = {"engine/llm_engine.py", "entrypoints/chunked_llm.py", "kv_store/disk.py"}


def test_every_file_that_the_page_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    names = set(re.findall(r"`([\w./]+\.(?:py|md)|[\w./]+/[\w./]*)`", text))
    assert len(names) > 40
    homes = (ROOT, PACKAGE, PACKAGE / "blend" / "selectors", PACKAGE / "features" / "kv_compress" / "metrics")
    assert [name for name in sorted(names) if not any((home / name).exists() for home in homes)] == []


def test_files_are_short() -> None:
    lines = {path.relative_to(PACKAGE).as_posix(): path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    assert {name for name, count in lines.items() if count > LONG} <= EXPLAINED


def test_the_server_page_has_every_flag() -> None:
    """Its tables have those of the server; those of the engine, which it mentions too, are on a page of their own."""
    text = (ROOT / "docs" / "server.md").read_text()
    flags = set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*)", text))
    own = {option.name.replace("_", "-") for option in ServerOptions.options()}
    engine = {name.replace("_", "-") for name in re.findall(r"(?m)^\| `(\w+)` \|", options_page())}
    assert own - {flag.removeprefix("no-") for flag in flags} == set()
    others = {"server", "kill"}  # of python -m benchmarks.serving
    assert {flag for flag in flags - others if flag.removeprefix("no-") not in own | engine} == {"config", "help"}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", ["operations", "store_format"])
def test_blocks_print_what_the_page_says(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The Python blocks of a page make one program."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    [printed] = re.findall(r"```\n\n((?:    [^\n]*\n)+)", text)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    exec(compile("\n".join(blocks), f"docs/{name}.md", "exec"), {})
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [line.strip() for line in printed.splitlines()]


def test_the_counts_of_vllms_own_tests_add_up() -> None:
    text = (ROOT / "docs" / "vllm_tests.md").read_text(encoding="utf-8")
    rows = [
        (name, int(passed), int(count))
        for name, passed, count in re.findall(r"(?m)^\| `(.*?)\| (\d+) of (\d+) \|", text)
    ]
    assert len(rows) > 10 and all(passed <= count for _, passed, count in rows)
    folders = [row for row in rows if row[0].startswith(("entrypoints/llm/", "samplers/"))]
    (passed, count), (first, of_first) = (
        (sum(row[1] for row in part), sum(row[2] for row in part)) for part in (rows, folders)
    )
    assert f"{passed} of {count} pass ({first} of the {of_first} in the first two folders)" in text
