"""Warn of environment variables that look like misspelt settings of the scripts: TOPK=8 would silently change nothing.

    python scripts/check_variables.py

The known names are read from the scripts themselves. A name that resembles one of them is reported on stderr with the
one it may have been meant to be, unless it is known to mean something else.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

SCRIPTS = Path(__file__).parent
SIMILARITY = 0.8
SHORT = 4  # letters; shorter names resemble each other by chance
# Names of other programs that resemble one of ours.
OTHERS = {"PAGER", "MODELS", "PYTHONPATH", "PYTHONHOME", "MKL_NUM_THREADS", "CONFIGS"}


def known_names(folder: Path = SCRIPTS) -> set[str]:
    """Return the variables that the scripts in a folder read: those that they turn into flags, and those with a
    default."""
    found: set[str] = set()
    for path in folder.rglob("*.sh"):
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"^flags_from_env (.*)$", text, re.MULTILINE):
            found.update(line.split())
        found.update(re.findall(r"\$\{([A-Z][A-Z_]+):?[-+]", text))
    return found


def misspelt(given: Iterable[str], known: set[str]) -> Iterator[tuple[str, str]]:
    """Yield each given name that resembles a known one, with that one."""
    plain = {name.replace("_", ""): name for name in sorted(known)}
    for name in sorted(given):
        letters = re.sub(r"[^A-Z0-9]", "", name.upper())
        if name in known or name in OTHERS or len(letters) < SHORT:
            continue
        if close := difflib.get_close_matches(letters, plain, n=1, cutoff=SIMILARITY):
            yield name, plain[close[0]]


def main() -> None:
    """Report on stderr what this process was given."""
    for name, meant in misspelt(os.environ, known_names()):
        print(f"warning: no script reads the variable {name}: did you mean {meant}?", file=sys.stderr)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
