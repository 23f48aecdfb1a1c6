"""What docs/architecture.md says of files: that they are there, and short."""

from __future__ import annotations

import re
from pathlib import Path

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
