"""Run notebooks from top to bottom and write their outputs into them, without times and without messages.

    pip install -e '.[dev]'
    python scripts/run_notebooks.py [notebooks/01_quickstart.ipynb ...]

All of `notebooks/` by default. `scripts/test.sh` runs them too, and compares nothing, as times differ. A kernel runs in
the notebook's folder, so paths that outputs show are relative.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def main(paths: list[Path]) -> None:
    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        client = NotebookClient(notebook, resources={"metadata": {"path": str(path.parent)}}, record_timing=False)
        client.execute()
        for index, cell in enumerate(notebook.cells):
            cell.id = f"cell-{index}"  # a random id would change with every run
            if cell.cell_type == "code":
                cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="*", type=Path, help="those to run (default: all of notebooks/)")
    given = parser.parse_args().notebooks
    if missing := [str(path) for path in given if not path.is_file()]:
        parser.error(f"there is no notebook {', '.join(missing)}")
    main([path.resolve() for path in given] or sorted(NOTEBOOKS.glob("*.ipynb")))
