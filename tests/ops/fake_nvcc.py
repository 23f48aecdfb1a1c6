"""A compiler that writes text instead of code: what a build does around nvcc can be tested without CUDA."""

from __future__ import annotations

import sys
from pathlib import Path

_SCRIPT = """#!{python}
import os, sys, time
arguments = sys.argv[1:]
if arguments == ["--version"]:
    print(os.environ.get("FAKE_VERSION", "fake 1.0"))
elif arguments == ["--list-gpu-code"]:
    print("sm_80\\nsm_86\\nsm_90")
else:
    with open({log!r}, "a") as log:
        log.write(" ".join(arguments) + "\\n")
    time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
    if os.environ.get("FAKE_FAILS", "nothing") in " ".join(arguments):
        sys.exit("kernel.cu(7): error: this is no CUDA")
    sources = [a for a in arguments if a.endswith((".cu", ".cpp"))]
    with open(arguments[arguments.index("-o") + 1], "w") as out:
        out.write("\\n".join(open(source).read() for source in sources))
"""


class FakeNvcc:
    """The script at `path`. FAKE_VERSION, FAKE_SECONDS (a call takes) and FAKE_FAILS (part of a command that fails) are
    environment variables."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "nvcc"
        self._log = folder / "nvcc.log"
        self.path.write_text(_SCRIPT.format(python=sys.executable, log=str(self._log)))
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """The arguments of every compilation and link so far."""
        return self._log.read_text().splitlines() if self._log.exists() else []
