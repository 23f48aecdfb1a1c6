"""Print PyTorch's index of CPU builds if torch should come from there: on Linux, without a GPU, if the index answers.

    python3 scripts/torch_index.py 2.13.0

On PyPI, torch for Linux is a CUDA build with 2.5 GB of libraries. If nothing is printed, torch comes from the sources
that pip is configured with. Standard library only: it runs before anything is installed.

TORCH_INDEX  another index to ask instead of PyTorch's; empty: none
"""

from __future__ import annotations

import argparse
import os
import runpy
import ssl
import sys
import threading
import urllib.parse
import urllib.request
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TIME_LIMIT = 5.0  # seconds for the index to answer, the look-up of its name included
SEES_GPU = Path(__file__).parents[1] / "vllm_blend" / "ops" / "cuda_build.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("release", help="the release of torch that is to be installed, such as 2.13.0")
    release = parser.parse_args().release
    index = os.environ.get("TORCH_INDEX", CPU_INDEX).rstrip("/")
    if not index or sys.platform != "linux" or runpy.run_path(str(SEES_GPU))["sees_gpu"]():
        return
    problem = ask(index, release)
    if problem is None:
        print(index)
    else:
        print(
            f"note: no CPU build of torch {release} at {index} ({problem}), so torch comes from pip's configured "
            "sources; PyPI's is the CUDA build (2.5 GB)",
            file=sys.stderr,
        )


def ask(index: str, release: str) -> str | None:
    """Return why the index does not have this release, or None if it does."""
    problem = f"no answer in {TIME_LIMIT:g} s"

    def read() -> None:
        nonlocal problem
        try:
            tls = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
            with urllib.request.urlopen(f"{index}/torch/", timeout=TIME_LIMIT, context=tls) as page:
                listed = f"torch-{release}+cpu" in urllib.parse.unquote(page.read().decode(errors="replace"))
            problem = "" if listed else "it is not listed there"
        except (OSError, ValueError) as error:
            problem = str(getattr(error, "reason", error))  # URLError has the cause there

    # In a thread, because looking up a name has no time limit of its own.
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(TIME_LIMIT)
    return problem or None


if __name__ == "__main__":
    main()
