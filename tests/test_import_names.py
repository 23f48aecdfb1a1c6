"""The import name `vllm` in real environments, with pip and uv and a stand-in for vLLM: the two are never mixed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import setuptools

from tests.checkout import copy_checkout
from tests.stand_ins import write_wheel

pytestmark = pytest.mark.cpu_only

OURS, THEIRS = "0.22.1+blend", "0.11.2"
THEIR_FILES = {
    "vllm/__init__.py": "",
    "vllm/outputs.py": "",
    "vllm/worker.py": "",
}  # two names are ours too, one is not
PROBE = """
import importlib.metadata, importlib.util, json, sys, warnings
warnings.simplefilter("error")
spec = importlib.util.find_spec("vllm")
try:
    found = importlib.metadata.version("vllm")
except importlib.metadata.PackageNotFoundError:
    found = None
assert importlib.util.find_spec("vllm_blend") is not None
try:
    import vllm_blend
except UserWarning:
    warned = True
else:
    warned = False
print(json.dumps([found, spec and spec.origin, importlib.util.find_spec("lmcache_vllm") is not None, warned]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy with the modules that names are about, so that building it takes less time."""
    folder = copy_checkout(tmp_path_factory.mktemp("checkout"))
    for each in (folder / "vllm_blend").iterdir():
        if each.is_dir() and each.name not in ("compat", "ops"):
            shutil.rmtree(each)
    return folder


@pytest.fixture(scope="module")
def vllm_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wheel(tmp_path_factory.mktemp("wheels"), "vllm", THEIRS, THEIR_FILES)


class Environment:
    """A new virtual environment, and an installer that works on it as its users would call it."""

    def __init__(self, folder: Path, tool: str) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        self.python = str(folder / "bin" / "python")
        [self.site] = (folder / "lib").glob("python*/site-packages")
        self.tool = tool
        # The build runs in this environment: setuptools is found by PYTHONPATH, as in pip's isolated builds.
        self.build_tools = folder / "build_tools"
        self.build_tools.mkdir()
        home = Path(setuptools.__file__).parent
        for path in (home, home.parent / "_distutils_hack", *home.parent.glob("setuptools-*.dist-info")):
            (self.build_tools / path.name).symlink_to(path)

    def __call__(self, command: str, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        tool = [self.tool, "pip"] if self.tool == "uv" else [self.tool]
        before = [] if self.tool == "uv" else ["--python", self.python]
        after = ["--python", self.python] if self.tool == "uv" else []
        if command == "install":
            after += ["--no-deps", "--no-index", "--no-build-isolation"]
        elif self.tool == "pip":
            after += ["--yes"]
        environment = os.environ | {"CXX": "true", "VLLM_BLEND_BUILD_CUDA": "0", "PYTHONPATH": str(self.build_tools)}
        environment.pop("VLLM_BLEND_ALIAS", None)
        run = [sys.executable, "-m", *tool, *before, command, *after, *map(str, arguments)]
        return subprocess.run(
            run, env=environment | variables, cwd=self.site, capture_output=True, text=True, timeout=300
        )

    def install(self, *arguments: str | Path, **variables: str) -> None:
        done = self("install", *arguments, **variables)
        assert done.returncode == 0, done.stdout + done.stderr

    def look(self) -> tuple[str | None, str | None, bool, bool]:
        """Return what `import vllm` gives, its version, whether lmcache_vllm is there, and whether vllm_blend warns."""
        # From another folder, without PYTHONPATH: what a user's script would find.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            [self.python, "-c", PROBE], cwd=self.build_tools, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found, origin, lmcache, warned = json.loads(done.stdout)
        folder = {str(path.relative_to(self.site)) for path in self.site.glob("vllm/**/*") if path.suffix == ".py"}
        assert folder in (set(), set(THEIR_FILES)), "the files of two packages are mixed"
        assert bool(folder) == (self.site / f"vllm-{THEIRS}.dist-info").exists()
        if origin is not None:
            theirs = Path(origin) == self.site / "vllm" / "__init__.py"
            assert theirs or origin.endswith("vllm_blend/compat/vllm/__init__.py")
            origin = "theirs" if theirs else "ours"
        return origin, found, lmcache, warned


@pytest.fixture(params=["pip", "uv"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment", request.param)


@pytest.mark.parametrize("editable", [True, False], ids=["editable", "copied"])
def test_ours_then_theirs(editable: bool, environment: Environment, checkout: Path, vllm_wheel: Path) -> None:
    environment.install(*(["--editable"] if editable else []), checkout)
    assert environment.look() == ("ours", OURS, True, False)

    links: list[str | Path] = ["--find-links", vllm_wheel.parent]
    if environment.tool == "pip":
        environment.install("vllm", *links)  # satisfied
        for command in (["install", f"vllm=={THEIRS}", *links], ["uninstall", "vllm"]):
            done = environment(*command)
            assert done.returncode != 0 and "Cannot uninstall vllm 0.22.1+blend" in done.stderr
            assert "installed by vllm-blend" in done.stderr
            assert environment.look() == ("ours", OURS, True, False)
    else:  # uv sees nothing but site-packages: both are there, whole
        environment.install("vllm", *links)
        assert environment.look() == ("theirs", THEIRS, True, True)
        assert environment("uninstall", "vllm").returncode == 0
        assert environment.look() == ("ours", OURS, True, False)
    assert environment("uninstall", "vllm-blend").returncode == 0
    assert not list(environment.site.glob("*vllm*"))


@pytest.mark.parametrize("editable", [True, False], ids=["editable", "copied"])
def test_theirs_then_ours(editable: bool, environment: Environment, checkout: Path, vllm_wheel: Path) -> None:
    environment.install(vllm_wheel)
    before = sorted(environment.site.rglob("*"))
    ours: list[str | Path] = [*(["--editable"] if editable else []), checkout]
    done = environment("install", *ours)
    assert done.returncode != 0 and f"vllm {THEIRS} is installed in this environment" in done.stdout + done.stderr
    assert "VLLM_BLEND_ALIAS=0" in done.stdout + done.stderr
    assert sorted(environment.site.rglob("*")) == before

    environment.install(*ours, VLLM_BLEND_ALIAS="0")  # side by side
    assert environment.look() == ("theirs", THEIRS, False, False)
    environment.install("--force-reinstall", *ours, VLLM_BLEND_ALIAS="1")  # as an installer that hides the environment
    assert environment.look() == ("theirs", THEIRS, True, True)
    assert environment("uninstall", "vllm").returncode == 0
    assert environment.look() == ("ours", OURS, True, False)


def test_without_the_names(environment: Environment, checkout: Path) -> None:
    environment.install(checkout)  # leaves a build folder with the names behind
    environment.install("--force-reinstall", checkout, VLLM_BLEND_ALIAS="0")
    assert environment.look() == (None, None, False, False)
    done = environment("install", checkout, "--force-reinstall", VLLM_BLEND_ALIAS="no")
    assert done.returncode != 0 and "VLLM_BLEND_ALIAS=no is unknown: use 0" in done.stdout + done.stderr


def test_the_users_own_site_packages_are_looked_at_where_python_uses_them(checkout: Path, tmp_path: Path) -> None:
    """Outside of virtual environments, that is."""
    environment = Environment(tmp_path / "environment", "pip")
    variables = os.environ | {"PYTHONPATH": str(environment.build_tools), "PYTHONUSERBASE": str(tmp_path / "user")}
    variables.pop("VLLM_BLEND_ALIAS", None)

    def run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([python, *arguments], cwd=checkout, env=variables, capture_output=True, text=True)

    base = vars(sys)["_base_executable"]  # what virtual environments are made from
    assert run(base, "setup.py", "egg_info").returncode == 0
    site = Path(run(base, "-c", "import site; print(site.getusersitepackages())").stdout.strip())
    assert tmp_path in site.parents
    with zipfile.ZipFile(write_wheel(tmp_path, "vllm", THEIRS)) as wheel:
        wheel.extractall(site)
    refused = run(base, "setup.py", "egg_info")
    assert refused.returncode != 0 and f"vllm {THEIRS} is installed in this environment" in refused.stderr
    assert run(environment.python, "setup.py", "egg_info").returncode == 0
