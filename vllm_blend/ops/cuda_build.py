"""Compiles the CUDA kernels (csrc/cuda) with nvcc: one list of flags for an installation, the script and first use.

Standard library only, and it runs as a file: setup.py and the scripts use it where there is no torch yet.

    python3 -I vllm_blend/ops/cuda_build.py --out build/cuda    # for every GPU; scripts/build_cuda.sh adds a report
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import logging
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

logger = logging.getLogger(__name__)

LIBRARY_NAME = "libvllm_blend_cuda.so"
BUILD_VARIABLE = "VLLM_BLEND_BUILD_CUDA"  # 0: build nothing by itself; 1: an installation must build; else where it can
FLAGS = ["-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall", "-Xptxas", "-v"]
FLAGS += ["--expt-relaxed-constexpr"]
EVERY_GPU = ["-gencode=arch=compute_80,code=sm_80", "-gencode=arch=compute_90,code=[sm_90,compute_90]"]
HOPPER = ["-gencode=arch=compute_90a,code=sm_90a"]  # for sources with "wgmma" in their name: no other GPU has it
DEFAULT_TOOLKIT = "/usr/local/cuda"
OLDEST = (8, 0)
MESSAGE_LIMIT = 2000  # characters of a compiler's message that go into an error

Capability = tuple[int, int]  # compute capability of a GPU


class BuildError(RuntimeError):
    """The kernels could not be built; the message says why, with the compiler's own words."""


def sources_folder() -> Path:
    """Return the folder of the CUDA sources: inside an installed package, or in the checkout around it."""
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "csrc" / "cuda", here.parents[2] / "csrc" / "cuda"):
        if (folder / "kernels.h").is_file():
            return folder
    raise BuildError("the CUDA sources (csrc/cuda) are not in this installation: install it again")


def sees_gpu() -> bool:
    """Return whether there is a CUDA driver that works and sees a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def find_nvcc() -> str:
    """Return CUDACXX, else nvcc of CUDA_HOME or CUDA_PATH, else the one in PATH, else that of /usr/local/cuda."""
    named = os.environ.get("CUDACXX")
    if named:
        found = shutil.which(named)
        if found is None:
            raise BuildError(f"CUDACXX={named} is not a program: name nvcc there, or unset it")
        return found
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [*(str(Path(root, "bin", "nvcc")) for root in roots if root), "nvcc", f"{DEFAULT_TOOLKIT}/bin/nvcc"]
    for candidate in candidates:
        found = shutil.which(candidate)
        if found is not None:
            return found
    raise BuildError("nvcc was not found: install the CUDA toolkit, or name nvcc in CUDACXX or its folder in CUDA_HOME")


def source_digest(folder: Path) -> str:
    """Return a hexadecimal digest of every source and header, names included. A library carries that of its own."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".cu", ".cuh", ".h")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:32]


def is_built_from(library: Path, folder: Path) -> bool:
    """Return whether a library was built from the sources as they are in `folder` now."""
    with library.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return False
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(source_digest(folder).encode()) >= 0


@dataclass(frozen=True)
class Build:
    """What is compiled, with which compiler, for which GPUs (none named: for all that are supported)."""

    folder: Path
    nvcc: str
    capabilities: tuple[Capability, ...] = ()
    defines: tuple[str, ...] = ()

    @cached_property
    def compiler_version(self) -> str:
        return _run([self.nvcc, "--version"]).stdout

    @cached_property
    def key(self) -> str:
        """Return a name of everything that the library depends on."""
        parts = (source_digest(self.folder), self.compiler_version, FLAGS, HOPPER, self._architectures, self.defines)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]

    @cached_property
    def _architectures(self) -> list[str]:
        if not self.capabilities:
            return EVERY_GPU
        known = _run([self.nvcc, "--list-gpu-code"]).stdout.split()
        flags = []
        for major, minor in sorted(set(self.capabilities)):
            name = f"{major}{minor}"
            if f"sm_{name}" in known:
                flags.append(f"-gencode=arch=compute_{name},code=sm_{name}")
            else:  # a GPU newer than this nvcc: the driver compiles the newest portable code for it
                flags.append("-gencode=arch=compute_90,code=compute_90")
        return list(dict.fromkeys(flags))

    def command(self, source: Path) -> list[str]:
        """Return the command that compiles a source, its output left out."""
        architectures = HOPPER if "wgmma" in source.name else self._architectures
        return [self.nvcc, *FLAGS, *self.defines, *architectures, "-c", str(source)]

    def run(self, out: Path, jobs: int) -> Path:
        """Compile what has changed into `out` and link the library there, whole or not at all; return its path."""
        out.mkdir(parents=True, exist_ok=True)
        sources = sorted(self.folder.glob("*.cu"))
        headers = [*self.folder.glob("*.cuh"), *self.folder.glob("*.h")]
        newest_header = max(path.stat().st_mtime for path in headers)
        digest = source_digest(self.folder)  # what is edited from here on makes the library a stale one
        with _locked(out / ".lock"), ThreadPoolExecutor(max_workers=max(1, jobs)) as pool:
            objects = list(pool.map(lambda source: self._object(source, out, newest_header), sources))
            return self._link(objects, digest, out)

    def _object(self, source: Path, out: Path, newest_header: float) -> Path:
        """Compile a source as `out`/NAME.o; NAME.o.log holds the command and what the compiler said."""
        target, command = out / f"{source.stem}.o", self.command(source)
        log, first_line = out / f"{target.name}.log", " ".join(command) + "\n"
        old = not target.exists() or target.stat().st_mtime <= max(newest_header, source.stat().st_mtime)
        if not old and log.exists() and log.read_text().startswith(first_line):
            return target
        target.unlink(missing_ok=True)
        partial = out / f"{target.name}.partial"
        log.write_text(first_line + _run([*command, "-o", str(partial)], source.name).stderr)
        return _move_into_place(partial, target, self.nvcc)

    def _link(self, objects: Sequence[Path], digest: str, out: Path) -> Path:
        mark = out / "sources.cpp"
        mark.write_text(
            f'extern "C" __attribute__((visibility("default"))) const char* vb_sources() {{ return "{digest}"; }}\n'
        )
        target, partial = out / LIBRARY_NAME, out / f"{LIBRARY_NAME}.partial"
        command = [self.nvcc, "-shared", "-cudart", "static", "-Xcompiler", "-fPIC", str(mark), *map(str, objects)]
        _run([*command, "-o", str(partial)], LIBRARY_NAME)
        return _move_into_place(partial, target, self.nvcc)


def _move_into_place(partial: Path, target: Path, nvcc: str) -> Path:
    """Give what nvcc wrote its name, once it is on the disk: a library of which a crash left half ends every process
    that loads it."""
    if not partial.is_file():
        raise BuildError(f"{nvcc} succeeded and wrote no {target.name}: is it nvcc?")
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    return partial.replace(target)


def cache_folder() -> Path:
    """Return where libraries built at first use are kept: vllm-blend in XDG_CACHE_HOME, else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-blend"


def build_for(capabilities: Sequence[Capability]) -> Path:
    """Return the library for GPUs of these compute capabilities in the user's cache, built first if it is not there.

    Several processes build it once. Raises BuildError saying why it cannot be had.
    """
    if os.environ.get(BUILD_VARIABLE) == "0":
        raise BuildError(f"the CUDA kernels are not built and {BUILD_VARIABLE}=0 forbids to build them: unset it")
    usable = tuple(sorted({c for c in capabilities if c >= OLDEST}))
    if not usable:
        raise BuildError(f"the CUDA kernels need a GPU of compute capability 8.0 or later, not {list(capabilities)}")
    build = Build(sources_folder(), find_nvcc(), usable)
    target = cache_folder() / build.key / LIBRARY_NAME
    if target.is_file():
        return target
    try:
        target.parent.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(target.parent.with_suffix(".lock")):
            if not target.is_file():
                _build_into(build, target)
    except OSError as error:
        raise BuildError(f"no place for the CUDA kernels in {cache_folder()} ({error}): set XDG_CACHE_HOME") from error
    return target


def _build_into(build: Build, target: Path) -> None:
    names = ", ".join(f"{major}.{minor}" for major, minor in build.capabilities)
    logger.warning("building the CUDA kernels for compute capability %s with %s, once", names, build.nvcc)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f"{build.key}.", dir=target.parent.parent) as folder:
        built = build.run(Path(folder), len(os.sched_getaffinity(0)))
        target.parent.mkdir(exist_ok=True)
        built.replace(target)
    logger.warning("built %s in %.0f s", target, time.perf_counter() - start)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that other processes see. The file stays: removing it would let two of them in."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waiting for another process that builds the CUDA kernels (%s)", path)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str], what: str = "") -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    except subprocess.CalledProcessError as error:
        noise = ("ptxas info", "    ")  # registers and spills
        lines = [line for line in (error.stdout + error.stderr).splitlines() if not line.startswith(noise)]
        said = "\n".join(lines).strip() or "\n(no message)"
        what = what or command[-1]
        raise BuildError(
            f"{command[0]} failed on {what} (exit status {error.returncode}):\n{said[:MESSAGE_LIMIT]}"
        ) from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds the CUDA kernels for every supported GPU.")
    parser.add_argument("--out", type=Path, default=Path("build/cuda"), help="folder of the objects and the library")
    parser.add_argument("--nvcc", help="the compiler (looked for by default)")
    parser.add_argument("--jobs", type=int, default=2, help="files compiled at once")
    parser.add_argument("--defines", default="", help="extra compiler flags, separated by spaces")
    args = parser.parse_args(arguments)
    try:
        build = Build(sources_folder(), args.nvcc or find_nvcc(), (), tuple(args.defines.split()))
        print(build.run(args.out, args.jobs))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
