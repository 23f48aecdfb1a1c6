"""Building the CUDA kernels: what is compiled when, for which GPU, once; and what happens where it cannot be."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ops.fake_nvcc import FakeNvcc
from vllm_blend.ops import cuda_build, cuda_library
from vllm_blend.ops.cuda_build import Build, BuildError

H200 = [(9, 0)]


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    """The compiler in use, with an empty cache of built libraries."""
    fake = FakeNvcc(tmp_path)
    monkeypatch.setenv("CUDACXX", str(fake.path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(cuda_build.BUILD_VARIABLE, raising=False)
    return fake


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    for name in ("a.cu", "b_wgmma.cu", "kernels.h"):
        (folder / name).write_text(f"// {name}\n")
    return folder


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One H200, as far as torch can tell, and no library that was built ahead."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(cuda_library, "library_path", lambda: None)
    _forget()
    yield
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    for function in (cuda_library.unavailable_reason, cuda_library.is_available, cuda_library.library):
        function.cache_clear()


def _sources_of(calls: list[str]) -> list[str]:
    return sorted(Path(call.split(" -c ")[1].split()[0]).name for call in calls if " -c " in call)


def test_only_what_changed_is_compiled_again(nvcc: FakeNvcc, sources: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def compiled(*defines: str) -> list[str]:
        before = len(nvcc.calls)
        library = Build(sources, str(nvcc.path), defines=defines).run(out, jobs=2)
        assert library == out / "libvllm_blend_cuda.so"
        return _sources_of(nvcc.calls[before:])

    def touch(paths: Iterable[Path], seconds: int) -> None:
        for path in paths:
            later = time.time() + seconds
            os.utime(path, (later, later))

    both = ["a.cu", "b_wgmma.cu"]
    assert compiled() == both
    assert compiled() == []
    touch([sources / "a.cu"], 10)
    assert compiled() == ["a.cu"]
    touch(out.glob("*.o"), 20)
    assert compiled() == []
    touch([sources / "kernels.h"], 30)
    assert compiled() == both
    touch(out.glob("*.o"), 40)
    assert compiled() == []
    assert compiled("-DVB_TEST") == both


def test_the_architectures_that_are_compiled_for(nvcc: FakeNvcc, sources: Path) -> None:
    def flags(name: str, *capabilities: tuple[int, int]) -> list[str]:
        command = Build(sources, str(nvcc.path), capabilities).command(sources / name)
        return [part.removeprefix("-gencode=arch=") for part in command if "-gencode" in part]

    assert flags("a.cu") == ["compute_80,code=sm_80", "compute_90,code=[sm_90,compute_90]"]
    assert flags("a.cu", (9, 0)) == ["compute_90,code=sm_90"]
    assert flags("a.cu", (8, 6), (9, 0), (8, 6)) == ["compute_86,code=sm_86", "compute_90,code=sm_90"]
    assert flags("a.cu", (12, 0)) == ["compute_90,code=compute_90"]  # unknown to this nvcc: left to the driver
    assert flags("b_wgmma.cu") == flags("b_wgmma.cu", (8, 0)) == ["compute_90a,code=sm_90a"]


def test_a_failed_compilation_says_what_the_compiler_said(
    nvcc: FakeNvcc, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FAILS", "a.cu")
    with pytest.raises(BuildError, match=r"(?s)failed on a\.cu.*kernel\.cu\(7\): error: this is no CUDA"):
        Build(sources, str(nvcc.path)).run(tmp_path / "out", jobs=2)
    assert not (tmp_path / "out" / "libvllm_blend_cuda.so").exists()
    monkeypatch.setenv("FAKE_FAILS", "nothing")
    assert Build(sources, str(nvcc.path)).run(tmp_path / "out", jobs=2).exists()


def test_what_is_no_compiler_is_named(sources: Path, tmp_path: Path) -> None:
    """One that succeeds and writes nothing, and one that fails with what is no text."""
    for commands, message in (("exit 0", r"wrote no \w+\.o: is it nvcc"), ("printf '\\377'; exit 1", "exit status 1")):
        program = tmp_path / "no-compiler"
        program.write_text(f"#!/bin/sh\n{commands}\n")
        program.chmod(0o755)
        with pytest.raises(BuildError, match=message):
            Build(sources, str(program)).run(tmp_path / "out", jobs=1)


def test_sources_edited_meanwhile_make_a_stale_library(
    nvcc: FakeNvcc, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = Build._object

    def edit_after(build: Build, *arguments: Any) -> Path:
        done = compiled(build, *arguments)
        (sources / "kernels.h").write_text("// edited\n")
        return done

    monkeypatch.setattr(Build, "_object", edit_after)
    assert not cuda_build.is_built_from(Build(sources, str(nvcc.path)).run(tmp_path / "out", jobs=1), sources)


def test_a_library_knows_its_sources(nvcc: FakeNvcc, sources: Path, tmp_path: Path) -> None:
    library = Build(sources, str(nvcc.path)).run(tmp_path / "out", jobs=1)
    assert cuda_build.is_built_from(library, sources)
    (sources / "kernels.h").write_text("// another interface\n")
    assert not cuda_build.is_built_from(library, sources)
    library.write_bytes(b"")
    assert not cuda_build.is_built_from(library, sources)


def test_the_key_covers_sources_compiler_and_gpu(
    nvcc: FakeNvcc, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(*capabilities: tuple[int, int]) -> str:
        return Build(sources, str(nvcc.path), capabilities).key

    keys = {key(), key((8, 0)), key((9, 0))}
    assert len(keys) == 3 and key((9, 0)) == key((9, 0), (9, 0))
    monkeypatch.setenv("FAKE_VERSION", "fake 2.0")
    keys.add(key((9, 0)))
    (sources / "a.cu").write_text("// changed\n")
    keys.add(key((9, 0)))
    (sources / "a.cu").rename(sources / "c.cu")
    keys.add(key((9, 0)))
    assert len(keys) == 6


def test_first_use_builds_once_for_the_present_gpu(nvcc: FakeNvcc, caplog: pytest.LogCaptureFixture) -> None:
    library = cuda_build.build_for([(7, 5), (9, 0)])
    assert library.parent.parent == cuda_build.cache_folder() and library.is_file()
    assert _sources_of(nvcc.calls) == sorted(p.name for p in cuda_build.sources_folder().glob("*.cu"))
    assert "sm_80" not in " ".join(nvcc.calls)
    assert [record.message.split(" for ")[0].split(" in ")[0] for record in caplog.records] == [
        "building the CUDA kernels",
        f"built {library}",
    ]
    count = len(nvcc.calls)
    assert cuda_build.build_for(H200) == library and len(nvcc.calls) == count
    assert sorted(p.name for p in library.parent.parent.iterdir()) == sorted(
        [library.parent.name, f"{library.parent.name}.lock"]
    )


def test_several_processes_build_once(nvcc: FakeNvcc, tmp_path: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(Path(cuda_build.__file__).parent)!r}); import cuda_build\n"
    program += f"print(cuda_build.build_for({H200}))"
    environment = os.environ | {"FAKE_SECONDS": "0.1"}
    command = [sys.executable, "-I", "-c", program]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(3)]
    paths = {process.communicate(timeout=300)[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len(paths) == 1 and Path(paths.pop()).is_file()
    assert sum("-shared" in call for call in nvcc.calls) == 1


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({cuda_build.BUILD_VARIABLE: "0"}, "VLLM_BLEND_BUILD_CUDA=0 forbids"),
        ({"CUDACXX": "no-such-nvcc"}, "CUDACXX=no-such-nvcc is not a program"),
        ({"CUDACXX": "", "PATH": "", "CUDA_HOME": "/nowhere"}, "nvcc was not found: install the CUDA toolkit"),
        ({"XDG_CACHE_HOME": "/dev/null"}, "no place for the CUDA kernels in /dev/null.*set XDG_CACHE_HOME"),
        ({"FAKE_FAILS": "-shared"}, "failed on libvllm_blend_cuda.so"),
    ],
)
def test_why_nothing_was_built(
    nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda_build, "DEFAULT_TOOLKIT", "/nowhere")
    with pytest.raises(BuildError, match=message):
        cuda_build.build_for(H200)


def test_an_old_gpu_is_not_built_for(nvcc: FakeNvcc) -> None:
    with pytest.raises(BuildError, match=r"compute capability 8\.0 or later, not \[\(7, 5\)\]"):
        cuda_build.build_for([(7, 5)])
    assert nvcc.calls == []


def test_nothing_is_built_without_a_gpu(nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda_library, "library_path", lambda: None)
    _forget()
    assert not cuda_library.is_available() and cuda_library.unavailable_reason() == "torch sees no CUDA device"
    _forget()
    assert nvcc.calls == []


def test_a_failed_build_warns_once_and_leaves_plain_torch(
    nvcc: FakeNvcc, gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FAKE_FAILS", ".cu ")
    assert not cuda_library.is_available() and not cuda_library.is_available()
    assert "this is no CUDA" in (cuda_library.unavailable_reason() or "")
    warnings = [r.message for r in caplog.records if "plain torch runs instead of the CUDA kernels" in r.message]
    assert len(warnings) == 1 and "this is no CUDA" in warnings[0]


def test_a_forced_backend_says_why_it_cannot_run(nvcc: FakeNvcc, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_blend.attention.registry import make_backend

    monkeypatch.setenv("FAKE_FAILS", ".cu ")
    with pytest.raises(RuntimeError, match=r"(?s)attention_backend='cuda'.*this is no CUDA"):
        make_backend("cuda", torch.device("cuda"), torch.bfloat16, 128)


def test_a_library_that_does_not_load_is_no_crash(nvcc: FakeNvcc, gpu: None) -> None:
    assert not cuda_library.is_available()  # the fake compiler's library is text
    reason = cuda_library.unavailable_reason() or ""
    assert "the CUDA kernels do not load" in reason and f"delete {cuda_build.cache_folder()}" in reason


def test_where_a_library_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cuda_library.LIBRARY_VARIABLE, str(tmp_path / "missing.so"))
    with pytest.raises(FileNotFoundError, match=r"VLLM_BLEND_CUDA_LIBRARY=.*missing\.so is not a file"):
        cuda_library.library_path()
    (tmp_path / "missing.so").touch()
    assert cuda_library.library_path() == tmp_path / "missing.so"
