"""A copy of what an installation reads, to install from: setup.py writes beside what it builds."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]


def copy_checkout(folder: Path) -> Path:
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, folder)
    unwanted = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in ("csrc", "vllm_blend"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    return folder
