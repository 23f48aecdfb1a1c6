"""What an installation carries, and when it compiles the CUDA kernels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.checkout import ROOT, copy_checkout
from tests.ops.fake_nvcc import FakeNvcc
from tests.stand_ins import COMPILER, needs_compiler, write_driver

CUDA_SOURCES = {f"csrc/cuda/{path.name}" for path in (ROOT / "csrc" / "cuda").iterdir()}
LIBRARY = "vllm_blend/libvllm_blend_cuda.so"
STATUS_PAGE = "vllm_blend/entrypoints/openai/metrics/status.html"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture
def nvcc(tmp_path: Path) -> FakeNvcc:
    return FakeNvcc(tmp_path)


def setup(checkout: Path, nvcc: FakeNvcc, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run setup.py. The CPU kernels are not what is looked at: a compiler that does nothing is quick."""
    environment = os.environ | {"CXX": "true", "CUDACXX": str(nvcc.path)} | variables
    shutil.rmtree(checkout / "build", ignore_errors=True)
    command = [sys.executable, "setup.py", "--quiet", *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)


def test_a_wheel_carries_the_sources_and_builds_from_them(checkout: Path, nvcc: FakeNvcc, tmp_path: Path) -> None:
    done = setup(checkout, nvcc, "bdist_wheel", "--dist-dir", str(tmp_path), VLLM_BLEND_BUILD_CUDA="0")
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert "-py3-none-" in wheel.name  # its libraries fit every Python
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    assert {f"vllm_blend/{name}" for name in CUDA_SOURCES} <= names
    assert STATUS_PAGE in names
    assert LIBRARY not in names and nvcc.calls == []

    script = tmp_path / "site" / "vllm_blend" / "ops" / "cuda_build.py"
    command = [sys.executable, "-I", str(script), "--out", str(tmp_path / "out"), "--nvcc", str(nvcc.path)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0 and Path(built.stdout.strip()).is_file(), built.stderr
    assert all(str(tmp_path / "site" / "vllm_blend" / "csrc") in call for call in nvcc.calls if " -c " in call)


def test_a_source_distribution_carries_the_sources(checkout: Path, nvcc: FakeNvcc, tmp_path: Path) -> None:
    done = setup(checkout, nvcc, "sdist", "--dist-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert CUDA_SOURCES | {STATUS_PAGE, "setup.py", "vllm_blend/ops/cuda_build.py", "csrc/vllm_blend_cpu.h"} <= names
    assert {"CHANGELOG.md", "CITATION.cff"} <= names
    assert not [name for name in names if name.startswith("tests")]  # a part of them cannot run


def test_the_library_of_an_installation_that_must_build_it(checkout: Path, nvcc: FakeNvcc) -> None:
    done = setup(checkout, nvcc, "build_ext", "--build-lib", "build/lib", VLLM_BLEND_BUILD_CUDA="1")
    assert done.returncode == 0, done.stderr
    library = checkout / "build" / "lib" / LIBRARY
    assert "vb_sources" in library.read_text()
    assert any("sm_80" in call for call in nvcc.calls)  # for every GPU: a wheel may be carried elsewhere

    done = setup(checkout, nvcc, "build_ext", VLLM_BLEND_BUILD_CUDA="1", FAKE_FAILS=".cu ")
    assert done.returncode != 0 and "kernel.cu(7): error: this is no CUDA" in done.stderr
    done = setup(checkout, nvcc, "build_ext", VLLM_BLEND_BUILD_CUDA="1", CUDACXX="no-such-nvcc")
    assert done.returncode != 0 and "CUDACXX=no-such-nvcc is not a program" in done.stderr
    done = setup(checkout, nvcc, "build_ext", VLLM_BLEND_BUILD_CUDA="true")
    assert done.returncode != 0 and "VLLM_BLEND_BUILD_CUDA=true is unknown: use 1" in done.stderr


def test_cpu_kernels_are_compiled_again_only_if_a_file_or_the_compiler_has_changed(
    nvcc: FakeNvcc, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    checkout = copy_checkout(own)
    library = checkout / "vllm_blend" / "libvllm_blend_cpu.so"
    for path in (checkout / "csrc" / "cpu").glob("*.cpp"):  # two of the sources are enough
        if path.name not in ("common.cpp", "attention.cpp"):
            path.unlink()

    def compiled(*arguments: str, **variables: str) -> int:
        """Build with a compiler that writes text; return how many files it compiled."""
        before = len(nvcc.calls)
        cpu_only = {"CXX": str(nvcc.path), "VLLM_BLEND_BUILD_CUDA": "0"}
        done = setup(checkout, nvcc, "build_ext", *arguments, **(cpu_only | variables))
        assert done.returncode == 0, done.stderr
        return sum(" -c " in f" {call} " for call in nvcc.calls[before:])

    every_file = compiled("--inplace")
    assert every_file > 1
    first, text = library.stat(), library.read_bytes()
    assert compiled("--inplace") == 0
    # The file itself stays: other processes may be loading it.
    assert (library.stat().st_ino, library.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    assert compiled("--build-lib", "build/lib") == 0
    assert (checkout / "build/lib/vllm_blend/libvllm_blend_cpu.so").read_bytes() == text

    with (checkout / "csrc" / "cpu" / "rows.h").open("a") as header:
        header.write("// changed\n")
    assert compiled("--inplace") == every_file and library.read_bytes() != text
    assert compiled("--inplace", FAKE_VERSION="fake 2.0") == every_file
    assert compiled("--inplace", FAKE_VERSION="fake 2.0") == 0
    compiled("--inplace", FAKE_FAILS="attention.cpp")  # a library of older sources is worse than none
    assert not library.exists()


HAS_DRIVER = Path("/proc/driver/nvidia/version").exists()


@pytest.mark.parametrize(
    "gpus",
    [
        pytest.param(None, marks=pytest.mark.skipif(HAS_DRIVER, reason="this machine has a driver")),
        pytest.param(0, marks=needs_compiler),
        pytest.param(1, marks=needs_compiler),
    ],
)
def test_an_installation_compiles_where_a_driver_sees_a_gpu(
    gpus: int | None, checkout: Path, nvcc: FakeNvcc, tmp_path: Path
) -> None:
    if gpus is not None:
        write_driver(tmp_path, gpus)
    done = setup(checkout, nvcc, "build_ext", "--build-lib", "build/lib", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (checkout / "build" / "lib" / LIBRARY).exists() is (gpus == 1)
    assert bool(nvcc.calls) is (gpus == 1)

    if gpus == 1:  # what cannot be compiled costs speed, not the installation
        useless = tmp_path / "useless"
        useless.write_text("#!/bin/sh\nprintf '\\377'\nexit 1\n")  # says what is no text
        useless.chmod(0o755)
        for variables in ({"FAKE_FAILS": ".cu "}, {"CUDACXX": "true"}, {"CUDACXX": str(useless)}):
            done = setup(checkout, nvcc, "build_ext", LD_LIBRARY_PATH=str(tmp_path), **variables)
            assert done.returncode == 0 and "the CUDA kernels were not built. Reason:" in done.stderr, done.stderr


def test_a_wheel_made_without_a_compiler_runs_the_example_of_the_readme(checkout: Path, tmp_path: Path) -> None:
    shutil.rmtree(checkout / "build", ignore_errors=True)
    bare = {"HOME": str(tmp_path), "PATH": str(tmp_path / "nothing"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=checkout, env=bare, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    site = install(wheel, tmp_path / "site", bare)
    assert not list(site.rglob("libvllm_blend*.so"))
    messages = run_the_readme(site, tmp_path, bare)
    assert "plain torch runs" in messages and "made where there is a C++ compiler; or install g++" in messages


@needs_compiler
@pytest.mark.slow
def test_a_source_distribution_installs_and_runs_the_example_of_the_readme(
    checkout: Path, nvcc: FakeNvcc, tmp_path: Path
) -> None:
    done = setup(checkout, nvcc, "sdist", "--dist-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob("*.tar.gz")
    # The kernels run one example: they need not be fast. A compiler that does not optimize, and has no instruction set
    # but that of every CPU, takes seconds instead of minutes.
    quick = tmp_path / "quick"
    quick.write_text(f'#!/bin/sh\ncase " $*" in *" -m"*) exit 1;; esac\nexec {COMPILER} "$@" -O0\n')
    quick.chmod(0o755)
    plain = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "VLLM_BLEND_BUILD_CUDA": "0"}
    plain["CXX"] = str(quick)
    site = install(path, tmp_path / "site", plain, "--no-build-isolation")
    assert (site / "vllm_blend" / "libvllm_blend_cpu.so").is_file()
    bare = plain | {"PATH": str(tmp_path / "nothing")}  # what it runs on need not have a compiler
    assert "plain torch runs" not in run_the_readme(site, tmp_path, bare)


def install(package: Path, site: Path, environment: dict[str, str], *options: str) -> Path:
    """Install a wheel or a source distribution without what it depends on; return the folder."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, *options, str(package)], env=environment, check=True, timeout=600)
    return site


def run_the_readme(site: Path, folder: Path, environment: dict[str, str]) -> str:
    """Run the example with what is installed, and compare what it prints; return its messages."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    [(code, printed)] = re.findall(r"```python\n(.*?)```\n\n((?:    [^\n]*\n)+)", text, re.DOTALL)
    code = f"import sys; sys.path.insert(0, {str(site)!r})\nimport vllm_blend; print(vllm_blend.__file__)\n{code}"
    (folder / "inputs").symlink_to(ROOT / "inputs")
    command = [sys.executable, "-P", "-c", code]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    home, *lines = run.stdout.splitlines()
    assert home == str(site / "vllm_blend" / "__init__.py")
    assert [line.strip() for line in lines] == [line.strip() for line in printed.splitlines()]
    return run.stderr
