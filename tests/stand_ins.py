"""Stand-ins for what tests must not fetch or need: wheels of other packages, and a CUDA driver."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

COMPILER = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="a driver of our own needs a C++ compiler")


def write_wheel(folder: Path, name: str, version: str, files: Mapping[str, str] | None = None) -> Path:
    """Write a wheel of a pure Python package that holds these files."""
    info = f"{name}-{version}.dist-info"
    contents = {
        **(files or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*contents, f"{info}/RECORD"])
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, text in contents.items():
            archive.writestr(inside, text)
    return path


def write_driver(folder: Path, gpus: int) -> Path:
    """Compile a CUDA driver that sees so many GPUs; with the folder in LD_LIBRARY_PATH it is the one that is found."""
    assert COMPILER is not None, "tests that make a driver carry the mark `needs_compiler`"
    folder.mkdir(exist_ok=True)
    source = folder / "driver.cpp"
    source.write_text(
        'extern "C" int cuInit(unsigned) { return 0; }\n'
        f'extern "C" int cuDeviceGetCount(int* count) {{ *count = {gpus}; return 0; }}\n'
    )
    subprocess.run([COMPILER, "-shared", "-fPIC", str(source), "-o", str(folder / "libcuda.so.1")], check=True)
    return folder
