"""The README names only what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import vllm_blend
from vllm_blend.blend.selectors import SELECTORS, make_selector

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_path_exists() -> None:
    paths = set(re.findall(r"\b(?:scripts|examples|inputs|configs|vllm_blend)/[\w./-]*\w", TEXT))
    assert {"scripts/quickstart.sh", "configs/musique.yaml", "examples/blend_hooks.py"} <= paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_the_code_is_python_and_the_rules_are_known() -> None:
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        ast.parse(block)
    listed = re.search(r"Selection rules:\s(.*?), or your own", TEXT, re.DOTALL)
    assert listed is not None
    names = re.findall(r"`(\w+)`", listed[1])
    assert set(names) == set(SELECTORS) and [make_selector(name).name for name in names] == names
    assert "register_selector" in vllm_blend.__all__
