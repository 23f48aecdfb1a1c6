"""The package's imports have no circles, and nothing imports what is above it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vllm_blend"
# Folders from the bottom up. A folder imports nothing of a later row; modules at the top level are no folder.
ROWS = [
    ["distributed", "ops"],
    ["attention"],
    ["layers"],
    ["models"],
    ["kv_store", "blend"],
    ["chunks"],
    ["core"],
    ["worker"],
    ["executor"],
    ["engine"],
    ["features"],
    ["entrypoints"],
]


@cache
def imports() -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports: at its top, in functions, and for types alone."""
    modules = {_name(path): path for path in PACKAGE.rglob("*.py")}
    found: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                named = [f"{node.module}.{alias.name}" for alias in node.names]
                found[name] |= {each if each in modules else node.module for each in named} & modules.keys()
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & modules.keys()
    found["vllm_blend"] = set()  # its public names are imported on first use
    return found


def _name(path: Path) -> str:
    parts = ["vllm_blend", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_there_is_no_circle() -> None:
    graph = imports()
    state: dict[str, bool] = {}  # False while its imports are followed

    def follow(module: str, path: list[str]) -> None:
        assert state.get(module) is not False, " -> ".join([*path[path.index(module) :], module])
        if module not in state:
            state[module] = False
            for imported in sorted(graph[module] - {module}):
                follow(imported, [*path, module])
            state[module] = True

    for module in graph:
        follow(module, [])


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_arrows_go_down(row: int) -> None:
    above = {folder for later in ROWS[row + 1 :] for folder in later}
    for module, imported in imports().items():
        if module.split(".")[1:2] in [[folder] for folder in ROWS[row]]:
            up = {each for each in imported if each.split(".")[1:2] and each.split(".")[1] in above}
            assert not up, f"{module} imports {sorted(up)}"


def test_what_all_share_imports_nothing_of_the_engine() -> None:
    above = {"features", "engine", "worker"}
    for name in ("checks", "config", "devices", "inputs", "options", "registry", "sampling_params", "urls"):
        up = {each for each in imports()[f"vllm_blend.{name}"] if each.split(".")[1] in above}
        assert not up, f"{name} imports {sorted(up)}"
