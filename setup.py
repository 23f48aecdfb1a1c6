"""Packaging, and the optional build of the compiled kernels: plain C libraries without torch or Python headers.

CPU kernels: any C++17 compiler will do (CXX, else g++, clang++ or c++). One binary holds every instruction set and
picks at run time, so it may be copied to an older CPU of the same architecture. Where there is no compiler, or the
build fails, the package installs all the same and runs its plain torch twins. The library that lies in the checkout is
used again if the same compiler has made it of the same sources.

CUDA kernels: compiled here, for every supported GPU, where a driver sees a GPU and nvcc is found. Elsewhere (a build
machine, a container image) the first engine on a GPU compiles them for that GPU, from the sources that the package
carries (vllm_blend/ops/cuda_build.py). VLLM_BLEND_BUILD_CUDA=1 compiles them here in any case and fails if that fails;
0 never compiles them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import runpy
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent
CPU_SOURCES, CUDA_SOURCES = Path("csrc/cpu"), Path("csrc/cuda")
CUDA_LIBRARY = "vllm_blend.libvllm_blend_cuda"
NAMES_FOLDER = "vllm_blend/compat"  # holds the packages vllm and lmcache_vllm
NAMES = "vllm_blend_names"  # the .pth file, and the folder of the metadata that it puts on the path too
VLLM_VERSION = runpy.run_path(str(ROOT / NAMES_FOLDER / "vllm" / "version.py"))["__version__"]
OTEL = ["opentelemetry-sdk>=1.27", "opentelemetry-exporter-otlp-proto-http>=1.27"]
DOCS = ["mkdocs<2", "mkdocs-material", "mkdocstrings[python]", "ruff"]  # ruff formats signatures
NOTEBOOKS = ["ipykernel", "ipywidgets", "matplotlib"]
STRUCTURED = ["llguidance>=1.9"]
SERVER = [  # with what tools and JSON schemas need: clients take both for granted
    *("fastapi", "uvicorn", "uvloop", "httptools", "pyzmq", "msgspec", "prometheus-client"),
    *STRUCTURED,
]
INSTALLING = {"egg_info", "dist_info", "bdist_wheel", "editable_wheel", "install", "develop"}  # what pip and uv run
COMMON_SOURCE = "common.cpp"  # compiled once; every other source is compiled once per instruction set
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprefer-vector-width=512"]
X86_ISAS = {
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": AVX512,
    "avx512bf16": [*AVX512, "-mavx512bf16"],
    "amx": [*AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"],
}


class KernelLibrary(Extension):
    """A shared library with a C ABI, loaded by vllm_blend/ops/bindings.py; not a Python module."""

    def __init__(self, name: str, folder: Path, pattern: str) -> None:
        super().__init__(name, sources=[str(path) for path in sorted(folder.glob(pattern))], optional=True)
        self.depends = [str(path) for path in [*folder.glob("*.*h"), *folder.parent.glob("*.h")]]


class BuildPackage(build_py):
    """Add the CUDA sources, from which an installed package builds the kernels at first use, and the import names."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the checkout has the sources, and the wheel is not made from build_lib
            return
        built = Path(self.build_lib)
        sources = built / "vllm_blend" / CUDA_SOURCES
        # An earlier build in this tree may have left files that this one does not want.
        for leftover in (
            sources,
            *(built / name for name in ("vllm", "lmcache_vllm", f"{NAMES_FOLDER}/lmcache", NAMES)),
        ):
            shutil.rmtree(leftover, ignore_errors=True)
        (built / f"{NAMES}.pth").unlink(missing_ok=True)
        shutil.copytree(CUDA_SOURCES, sources)
        if names_wanted():
            for name, text in name_files(NAMES_FOLDER).items():
                (built / name).parent.mkdir(parents=True, exist_ok=True)
                (built / name).write_text(text)


class Wheel(bdist_wheel):
    """Say that a wheel fits every Python 3: its libraries have a C ABI of their own. Only the platform must be this."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class EditableWheel(editable_wheel):
    """Add the import names to the wheel that stands for an editable installation."""

    def run(self) -> None:
        super().run()
        if names_wanted():
            [path] = Path(self.dist_dir).glob("*.whl")
            add_to_wheel(path, name_files(str(ROOT / NAMES_FOLDER)))


def names_wanted() -> bool:
    """Return whether to install the import names `vllm` and `lmcache_vllm`."""
    return os.environ.get("VLLM_BLEND_ALIAS") != "0"


def check_names() -> None:
    """Stop an installation that gives the import names into an environment whose `import vllm` would stay vLLM's."""
    wanted = os.environ.get("VLLM_BLEND_ALIAS", "")
    if wanted not in ("", "0", "1"):
        sys.exit(
            f"error: VLLM_BLEND_ALIAS={wanted} is unknown: use 0 (do not install the import names vllm and "
            "lmcache_vllm), 1 (install them without looking for vLLM), or unset it"
        )
    if wanted:
        return
    paths = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    if sys.prefix == sys.base_prefix:
        paths.append(site.getusersitepackages())
    for found in distributions(path=paths):
        if found.name in ("vllm", "lmcache_vllm"):
            sys.exit(
                f"error: {found.name} {found.version} is installed in this environment, and `import {found.name}` can "
                "only be one of the two. Nothing was installed. Either install vllm-blend without the names vllm and "
                "lmcache_vllm, for `from vllm_blend import LLM` (VLLM_BLEND_ALIAS=0 pip install ...), or run "
                f"`pip uninstall {found.name}` first, or use another environment."
            )


def name_files(folder: str) -> dict[str, str]:
    """Return the files of site-packages, by path, that make the packages in `folder` importable and known to pip.

    No file of ours lies in a folder vllm/ of site-packages, so no order of installations can mix vLLM's files with
    ours: where both are installed, `import vllm` and its version are vLLM's, because site-packages comes first on the
    path. The metadata lets `importlib.metadata.version("vllm")` answer and satisfies requirements of vllm. It has no
    RECORD on purpose: pip refuses to replace or uninstall what has none, and names the INSTALLER.
    """
    info = f"{NAMES}/vllm-{VLLM_VERSION}.dist-info"
    summary = "The import name vllm of vllm-blend, which is uninstalled with it"
    return {
        f"{NAMES}.pth": f"{folder}\n{NAMES}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}\nSummary: {summary}\n",
        f"{info}/INSTALLER": "vllm-blend\n",
    }


def add_to_wheel(path: Path, files: dict[str, str]) -> None:
    """Write the wheel again with these files in it and in its RECORD."""
    from wheel.wheelfile import WheelFile

    original = path.rename(path.with_suffix(".original"))
    with zipfile.ZipFile(original) as source, WheelFile(path, "w") as target:
        for name in source.namelist():
            if not name.endswith(".dist-info/RECORD"):  # WheelFile writes it
                target.writestr(name, source.read(name))
        for name, text in files.items():
            target.writestr(name, text.encode())
    original.unlink()


class BuildKernels(build_ext):
    """Compile `KernelLibrary` extensions; a failure is reported and costs speed, not the installation."""

    def get_ext_filename(self, fullname: str) -> str:
        *packages, name = fullname.split(".")
        return os.path.join(*packages, f"{name}.so")

    def run(self) -> None:
        if self.inplace:  # a library of older sources is worse than none
            for ext in self.extensions:
                library = Path(self.get_ext_filename(ext.name))
                if ext.name == CUDA_LIBRARY or not is_up_to_date(library, ext.sources):
                    library.unlink(missing_ok=True)
        super().run()

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.unlink(missing_ok=True)
        if ext.name == CUDA_LIBRARY:
            build_cuda(target, Path(self.build_temp, "cuda"))
            return
        present = Path(self.get_ext_filename(ext.name))
        if is_up_to_date(present, ext.sources):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(present, target)  # with its time: setuptools leaves the one in the checkout as it is
            print(f"vllm-blend: {present} was made of these sources")
            return
        try:
            CPUKernels.of(ext.sources).compile(target)
        except (OSError, subprocess.SubprocessError) as error:
            detail = getattr(error, "stderr", None) or error
            print(
                f"\nvllm-blend: the CPU kernels were not built, plain torch will run instead. Reason:\n{detail}\n",
                file=sys.stderr,
            )


def build_cuda(target: Path, work: Path) -> None:
    """Build the CUDA kernels for every GPU as `target`, if they are wanted (see the module's docstring)."""
    spec = importlib.util.spec_from_file_location("cuda_build", ROOT / "vllm_blend" / "ops" / "cuda_build.py")
    assert spec is not None and spec.loader is not None
    cuda_build = sys.modules["cuda_build"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cuda_build)  # by path: importing the package would need torch
    wanted = os.environ.get(cuda_build.BUILD_VARIABLE, "")
    if wanted not in ("", "0", "1"):
        raise ValueError(f"{cuda_build.BUILD_VARIABLE}={wanted} is unknown: use 1 (build), 0 (do not), or unset it")
    if wanted == "0" or (wanted != "1" and not cuda_build.sees_gpu()):
        print("vllm-blend: the CUDA kernels are left to the first use on a GPU")
        return
    try:
        built = cuda_build.Build(ROOT / CUDA_SOURCES, cuda_build.find_nvcc()).run(work, os.cpu_count() or 1)
    except (cuda_build.BuildError, OSError) as error:  # OSError: a full disk
        if wanted == "1":
            raise
        print(f"\nvllm-blend: the CUDA kernels were not built. Reason:\n{error}\n", file=sys.stderr)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(built, target)
    print(f"vllm-blend: built {target}")


def find_compiler() -> str:
    for candidate in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if candidate and shutil.which(candidate):
            return candidate
    raise FileNotFoundError("no C++ compiler found: install g++ or clang++, or name one in the variable CXX")


def accepts(compiler: str, flags: list[str]) -> bool:
    """Return whether the compiler builds and links an empty program with these flags."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.cpp")
        source.write_text("int main() { return 0; }\n")
        command = [compiler, *flags, str(source), "-o", str(Path(folder, "probe"))]
        return subprocess.run(command, capture_output=True).returncode == 0


@dataclass(frozen=True)
class CPUKernels:
    """What the library of the CPU kernels is made of, and by which compiler."""

    compiler: str
    openmp: list[str]
    isas: dict[str, list[str]]  # the compiler's flags of each instruction set
    sources: Sequence[Path]

    @classmethod
    def of(cls, sources: Sequence[str]) -> CPUKernels:
        """Ask the compiler what it can do. Raises FileNotFoundError if there is none."""
        compiler = find_compiler()
        openmp = ["-fopenmp"] if accepts(compiler, ["-fopenmp"]) else []
        isas: dict[str, list[str]] = {"generic": []}
        if platform.machine().lower() in ("x86_64", "amd64"):
            isas |= {isa: extra for isa, extra in X86_ISAS.items() if accepts(compiler, extra)}
        return cls(compiler, openmp, isas, [Path(source) for source in sources])

    @property
    def mark(self) -> str:
        """Return the text that the library carries: a digest of every file, every flag and the compiler's version."""
        version = subprocess.run([self.compiler, "--version"], capture_output=True, text=True, cwd=ROOT).stdout
        digest = hashlib.sha256(repr((self.compiler, version, FLAGS, self.openmp, self.isas)).encode())
        for path in sorted([*CPU_SOURCES.iterdir(), *CPU_SOURCES.parent.glob("*.h")]):
            digest.update(f"{path} {path.stat().st_size} ".encode() + path.read_bytes())
        return f"vllm-blend CPU kernels {digest.hexdigest()}"

    def compile(self, target: Path) -> None:
        """Write the library. Raises CalledProcessError with what the compiler said."""
        with tempfile.TemporaryDirectory() as folder:
            objects: list[str] = []
            commands: list[list[str]] = []

            def add(source: Path, label: str, extra: list[str]) -> None:
                objects.append(str(Path(folder, f"{label}.{source.stem}.o")))
                commands.append([self.compiler, *FLAGS, *self.openmp, *extra, "-c", str(source), "-o", objects[-1]])

            for source in self.sources:
                if source.name == COMMON_SOURCE:
                    add(source, "common", [f"-DVB_HAVE_{isa.upper()}" for isa in self.isas])
                else:
                    for isa, extra in self.isas.items():
                        add(source, isa, [f"-DVB_ISA={isa}", *extra])
            marked = Path(folder, "mark.cpp")
            marked.write_text(f'extern "C" const char* vb_cpu_mark() {{ return "{self.mark}"; }}\n')
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                list(pool.map(run, commands))
            target.parent.mkdir(parents=True, exist_ok=True)
            run([self.compiler, "-shared", "-fPIC", *self.openmp, str(marked), *objects, "-o", str(target)])
        threads = "" if self.openmp else ", without OpenMP: one thread"
        print(f"vllm-blend: built {target} for {', '.join(self.isas)}{threads}")


def is_up_to_date(library: Path, sources: Sequence[str]) -> bool:
    """Return whether the compiler at hand would make this library again."""
    try:
        return CPUKernels.of(sources).mark.encode() in library.read_bytes()
    except OSError:  # no library, or no compiler
        return False


def run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)


if INSTALLING & set(sys.argv):
    check_names()
setup(
    name="vllm-blend",
    version="0.1.0",
    description="Reusable KV cache of text chunks, blended into any prompt, behind vLLM's API",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=find_packages(include=["vllm_blend", "vllm_blend.*"]),
    package_data={"vllm_blend.entrypoints.openai.metrics": ["status.html"]},
    ext_modules=[
        KernelLibrary("vllm_blend.libvllm_blend_cpu", CPU_SOURCES, "*.cpp"),
        KernelLibrary(CUDA_LIBRARY, CUDA_SOURCES, "*.cu"),
    ],
    cmdclass={
        "bdist_wheel": Wheel,
        "build_ext": BuildKernels,
        "build_py": BuildPackage,
        "editable_wheel": EditableWheel,
    },
    install_requires=[
        "torch>=2.8",
        "transformers>=4.56",
        "tokenizers",
        "safetensors",
        "numpy",
        "tqdm",
        "bm25s",
        "rouge-score",
        "pyyaml",
        "xxhash",
    ],
    entry_points={"console_scripts": ["vllm-blend = vllm_blend.entrypoints.cli:main"]},
    extras_require={
        "store": ["redis", "fsspec"],
        "server": SERVER,
        "gpu": ["xformers", "flashinfer-python"],
        "flashinfer": ["flashinfer-python"],
        "xformers": ["xformers"],
        "colbert": ["ragatouille"],
        "bench": ["matplotlib"],
        "notebooks": NOTEBOOKS,
        "docs": DOCS,
        "finetune": ["peft"],
        "ray": [*SERVER, "ray[serve,data]>=2.56,<2.61"],
        "otel": OTEL,
        "structured": STRUCTURED,
        "kv-events": ["pyzmq", "msgspec"],
        "gguf": ["gguf>=0.10"],
        "dev": [
            *SERVER,
            *OTEL,
            *NOTEBOOKS,
            *DOCS,
            "aiohttp",
            "anthropic",
            "httpx",
            "openai",
            "pytest",
            "pytest-xdist>=3.8",
            "hypothesis",
            "mypy",
            "nbmake",
            "peft",
            "redis",
            "fsspec",
            "gguf>=0.10",
            "jsonschema-rs",
            "setuptools>=77",
            "pip>=23.1",
            "uv",
        ],
    },
)
