"""The import name `vllm`, as installed: the classes are vllm-blend's own, where scripts for vLLM look for them."""

from __future__ import annotations

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
assert vllm.__version__ == vllm_blend.__version__
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


@pytest.mark.parametrize(("name", "folder"), [("vllm", "vllm-0.22.1"), ("lmcache_vllm", "lmcache_vllm-0.6.2")])
def test_a_foreign_distribution_is_named_with_the_fix(tmp_path, name, folder):
    info = tmp_path / f"{folder}.dist-info"
    info.mkdir()
    release = folder.rpartition("-")[2]
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    done = run("import vllm_blend", tmp_path)
    assert done.returncode == 0
    assert f"the distribution {name} {release} is installed beside vllm-blend" in done.stderr
    assert f"pip uninstall {name}" in done.stderr


def test_without_one_nothing_is_said():
    assert run("import vllm_blend").stderr == ""
