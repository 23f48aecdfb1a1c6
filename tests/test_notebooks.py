"""The committed notebooks: run from top to bottom, without errors, and with nothing of the machine that ran them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_BYTES = 250_000
# Absolute paths, addresses of objects, and colour codes of a traceback.
OF_A_MACHINE = re.compile(r"/(?:home|root|tmp|work|usr|opt|Users)/|\bat 0x[0-9a-f]+|\x1b\[|site-packages")


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def texts(cell: dict[str, Any]) -> str:
    """Return everything in a cell's outputs but pictures."""
    outputs = cell["outputs"]
    pieces = [output.get("text", "") for output in outputs]
    pieces += [data for output in outputs for kind, data in output.get("data", {}).items() if kind != "image/png"]
    return "\n".join("".join(piece) for piece in pieces)


def test_there_are_seven() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == [f"0{number}_" for number in range(1, 8)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_of_one_run_and_of_no_machine(path: Path) -> None:
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert {output["output_type"] for cell in code for output in cell["outputs"]} <= {
        "stream",
        "execute_result",
        "display_data",
    }
    assert [found for cell in code for found in OF_A_MACHINE.findall(texts(cell))] == []
    assert any("image/png" in output.get("data", {}) for cell in code for output in cell["outputs"])
    assert path.stat().st_size < MAX_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_and_paths_exist(path: Path) -> None:
    for cell in cells(path, "markdown"):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", "".join(cell["source"])):
            assert link.startswith("http") or (path.parent / link).exists(), link
    for cell in cells(path, "code"):
        source = "".join(cell["source"])
        ast.parse(source)
        for name in re.findall(r'"(\.\./[\w./-]+)"', source):
            assert (path.parent / name).exists(), name
