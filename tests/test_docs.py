"""What pages say of the code: docs/architecture.md of files, that they are there and short, docs/server.md of flags."""

from __future__ import annotations

import re
from pathlib import Path

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
