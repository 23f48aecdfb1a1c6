"""The import name `vllm`, as installed: the classes are vllm-blend's own, where scripts for vLLM look for them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder on the path in which `vllm` and `lmcache_vllm` are what setup.py installs under these names."""
    folder = tmp_path_factory.mktemp("site")
    for name in ("vllm", "lmcache_vllm"):
        (folder / name).symlink_to(ROOT / "vllm_blend/compat" / name)
    return folder


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True, check=False
    )


def test_the_names_are_those_of_vllm_blend(site):
    done = run(
        """
import vllm, vllm_blend
from vllm import (LLM, CompletionOutput, EngineArgs, LLMEngine, RequestOutput, SamplingParams, TextPrompt, TokensPrompt)
assert vllm.__file__.startswith({site!r}), vllm.__file__
assert vllm.__version__ == "0.22.1+blend" and vllm.__version_tuple__[:3] == (0, 22, 1)
for name in ("LLM", "CompletionOutput", "EngineArgs", "LLMEngine", "RequestOutput", "SamplingParams", "TextPrompt",
             "TokensPrompt"):
    assert getattr(vllm, name) is getattr(vllm_blend, name), name
from vllm.entrypoints.llm import LLM as a
from vllm.engine.llm_engine import LLMEngine as b
from vllm.engine.arg_utils import EngineArgs as c
from vllm.outputs import RequestOutput as d, CompletionOutput as e
from vllm.sampling_params import SamplingParams as f
from vllm.inputs import TextPrompt as g, TokensPrompt as h
assert (a, b, c, d, e, f, g, h) == (
    LLM, LLMEngine, EngineArgs, RequestOutput, CompletionOutput, SamplingParams, TextPrompt, TokensPrompt)
import lmcache_vllm
assert lmcache_vllm.__file__.startswith({site!r})
""".format(site=str(site)),
        site,
    )
    assert done.returncode == 0, done.stderr


def test_a_script_for_vllm_runs_as_it_is(site):
    done = run(
        """
from vllm import LLM, SamplingParams
llm = LLM(model={model!r}, gpu_memory_utilization=0.5)
for output in llm.generate(["Where is it?", "Who"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=3)):
    print(len(output.outputs[0].token_ids), repr(output.prompt))
""".format(model=str(ROOT / "inputs/demo-model")),
        site,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 'Where is it?'", "3 'Who'"]


@pytest.mark.parametrize("name", ["vllm", "lmcache_vllm"])
def test_another_package_of_the_name_is_reported_with_the_fix(tmp_path, name):
    compat = ROOT / "vllm_blend/compat"
    for installed, other in itertools.product([True, False], repeat=2):
        package = tmp_path / f"{installed}-{other}"
        (package / (name if other else "unrelated")).mkdir(parents=True)
        (package / (name if other else "unrelated") / "__init__.py").touch()
        done = run("import vllm_blend", package, *([compat] if installed else []))
        assert done.returncode == 0
        if installed and other:
            assert f"`import {name}` gives {package / name / '__init__.py'} and not vllm-blend" in done.stderr
            assert f"pip uninstall {name}" in done.stderr and "VLLM_BLEND_ALIAS=0" in done.stderr
        else:  # beside vLLM, without the names, is how both are meant to be used
            assert done.stderr == ""
