"""Keeps OpenMP's threads from burning the cores on which other programs wait to run.

By default libgomp's threads wait for each other by spinning, for milliseconds at the end of every product. On a quiet
machine the partner arrives at once. On a busy one it has lost its core, perhaps to the very thread that spins, and a
model runs several times slower than its arithmetic takes. Short spinning, then sleep, costs a quiet machine nothing
that could be measured.

A runtime reads its variables when it is loaded, which is when torch is imported. Where this package is imported first,
it sets them. Otherwise `limit_spinning` uses a rule that libgomp's manual gives with GOMP_SPINCOUNT: threads spin
briefly while the process has more OpenMP threads than cores, and the idle ones of another thread's pool count too.
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache
from pathlib import Path

VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # where one is set, nothing is changed
SHORT_WAITS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}  # of libgomp; of LLVM's and Intel's runtimes, in ms
MAPPED_FILES = Path("/proc/self/maps")  # Linux alone has it
THREAD_NAME = "openmp-pool"


def loaded_runtimes(prefix: str) -> set[str]:
    """Return the paths of the libraries in this process whose file names begin with `prefix`."""
    if not MAPPED_FILES.exists():
        return set()
    paths = (line.rstrip("\n").partition("/") for line in MAPPED_FILES.open(encoding="utf-8"))
    return {f"/{path}" for _, slash, path in paths if slash and path.rpartition("/")[2].startswith(prefix)}


USER_DECIDES = any(name in os.environ for name in VARIABLES)
LOADED_BEFORE = loaded_runtimes("libgomp")  # these have read their variables already
if not USER_DECIDES:
    os.environ.update(SHORT_WAITS)


@cache
def limit_spinning() -> None:
    """Have the threads of runtimes that were loaded before this package spin briefly too, unless the user has set one
    of the variables. LLVM's runtime changes this for the calling thread and its helpers only."""
    if USER_DECIDES:
        return
    for path in loaded_runtimes("libgomp") & LOADED_BEFORE:
        _keep_idle_pool(path)
    for path in loaded_runtimes("libomp") | loaded_runtimes("libiomp5"):
        ctypes.CDLL(path).kmp_set_blocktime(int(SHORT_WAITS["KMP_BLOCKTIME"]))


def _keep_idle_pool(path: str) -> None:
    """Give a thread that does nothing else a pool of one OpenMP thread more than there are cores."""
    library, started = ctypes.CDLL(path), threading.Event()

    def hold() -> None:
        # A parallel region needs a function to run: this one takes no arguments and changes nothing.
        library.GOMP_parallel(library.omp_get_thread_num, None, len(os.sched_getaffinity(0)) + 1, 0)
        started.set()
        threading.Event().wait()

    threading.Thread(target=hold, daemon=True, name=THREAD_NAME).start()
    started.wait()
