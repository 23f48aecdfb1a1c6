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


SCRIPT = """
from vllm import LLM, SamplingParams
llm = LLM(model={model!r}, gpu_memory_utilization=0.5)
for output in llm.generate(["Where is it?", "Who"], SamplingParams(temperature=0.8, top_p=0.95, max_tokens=3)):
    print(len(output.outputs[0].token_ids), repr(output.prompt))
"""
NO_COMPILER = """
import sys, torch
assert "torch._dynamo" not in sys.modules or torch.cuda.is_available()  # importing it takes a second
"""
NAMES = """
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
from vllm import AsyncEngineArgs, AsyncLLMEngine
from vllm.engine.arg_utils import AsyncEngineArgs as i
from vllm.engine.async_llm_engine import AsyncLLMEngine as j
from vllm.v1.engine.async_llm import AsyncLLM as k
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.sampling_params import RequestOutputKind
assert (i, j, k) == (AsyncEngineArgs, AsyncLLMEngine, AsyncLLMEngine)
assert AsyncEngineArgs("m", max_model_len=8, disable_log_requests=True).max_model_len == 8
assert [kind.name for kind in RequestOutputKind] == ["CUMULATIVE", "DELTA", "FINAL_ONLY"]
import lmcache_vllm
assert lmcache_vllm.__file__.startswith({site!r})
"""


@pytest.mark.parametrize("name", ["vllm", "lmcache_vllm"])
def test_another_package_of_the_name_is_reported_with_the_fix(tmp_path: Path, name: str) -> None:
    compat = ROOT / "vllm_blend/compat"
    for installed, other in itertools.product([True, False], repeat=2):
        package = tmp_path / f"{installed}-{other}"
        (package / (name if other else "unrelated")).mkdir(parents=True)
        (package / (name if other else "unrelated") / "__init__.py").touch()
        # The environment of the tests may have the names installed.
        path = (
            f"import sys; sys.path[:] = [p for p in sys.path if {installed} or os.path.realpath(p) != {str(compat)!r}]"
        )
        done = run(f"import os; {path}; import vllm_blend", package, *([compat] if installed else []))
        assert done.returncode == 0
        if installed and other:
            assert f"`import {name}` gives {package / name / '__init__.py'} and not vllm-blend" in done.stderr
            assert f"pip uninstall {name}" in done.stderr and "VLLM_BLEND_ALIAS=0" in done.stderr
        else:  # beside vLLM, without the names, is how both are meant to be used
            assert done.stderr == ""


def test_a_script_for_vllm_runs_as_it_is_and_modules_work_or_refuse_what_is_asked_of_them(site: Path) -> None:
    """The names are ours. One process runs the script, and then imports all of them."""
    done = run(
        SCRIPT.format(model=str(ROOT / "inputs/demo-model"))
        + NO_COMPILER
        + NAMES.format(site=str(site))
        + """
import logging, torch
from vllm import LLM, SamplingParams, config, distributed, tokenizers, utils
from vllm.beam_search import BeamSearchOutput, BeamSearchSequence
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory, destroy_model_parallel
from vllm.entrypoints.chat_utils import resolve_hf_chat_template
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.renderers.hf import resolve_chat_template
from vllm.sampling_params import BeamSearchParams, GuidedDecodingParams, StructuredOutputsParams
from vllm.transformers_utils.tokenizer import get_tokenizer
from vllm.engine.arg_utils import EngineArgs

model = {model!r}
llm = LLM(model, max_model_len=64, max_num_seqs=4, dtype="float32")
known = llm.llm_engine.model_config
assert known is llm.llm_engine.get_model_config() and isinstance(known, config.ModelConfig)
assert (known.model, known.tokenizer, known.max_model_len, known.dtype) == (model, model, 64, torch.float32)
assert known.hf_config.num_hidden_layers == 12 and known.get_vocab_size() == 2048
tokenizer = get_tokenizer(model, tokenizer_mode="auto", add_bos_token=True)
assert tokenizers.get_tokenizer is get_tokenizer and tokenizer.truncation_side == "left"
assert tokenizer.encode("Who") == llm.get_tokenizer().encode("Who") == llm.llm_engine.get_tokenizer().encode("Who")
assert resolve_chat_template(tokenizer, None, None, model_config=known) is None
tokenizer.chat_template = "own"
assert resolve_hf_chat_template(tokenizer, None, None, model_config=known) == "own"
assert resolve_hf_chat_template(tokenizer, "given", None, model_config=known) == "given"
[output] = llm.generate("Who", SamplingParams(max_tokens=1, logprobs=1))
assert all(isinstance(entry, Logprob) for entry in output.outputs[0].logprobs[0].values())
[found] = llm.beam_search("Who", BeamSearchParams(beam_width=2, max_tokens=1))
assert isinstance(found, BeamSearchOutput) and all(isinstance(one, BeamSearchSequence) for one in found.sequences)

form = StructuredOutputsParams(regex="a")
assert SamplingParams(structured_outputs=form).structured_outputs == form
assert SamplingParams(guided_decoding=GuidedDecodingParams(regex="a")).structured_outputs == form

destroy_model_parallel()
cleanup_dist_env_and_memory()
assert (distributed.get_tensor_model_parallel_world_size(), distributed.get_tensor_model_parallel_rank()) == (1, 0)
assert 0 < utils.get_open_port() < 2**16 and len({{utils.random_uuid() for _ in range(9)}}) == 9
parser = EngineArgs.add_cli_args(utils.FlexibleArgumentParser())
for flag in ("--max_model_len=8", "--max-model-len=8"):
    assert EngineArgs.from_cli_args(parser.parse_args(["--model", "a_b", flag])) == EngineArgs("a_b", max_model_len=8)

refused = [
    ("LoRARequest is not supported: merge the LoRA adapter", lambda: LoRARequest("name", 1, "path")),
    ("CompilationConfig is not supported", lambda: config.CompilationConfig(level=3)),
    ("tokenizer_mode='slow' is not supported", lambda: get_tokenizer(model, tokenizer_mode="slow")),
    ("initialize_model_parallel is not supported", lambda: distributed.initialize_model_parallel(2)),
    ("init_distributed_environment is not supported", lambda: distributed.init_distributed_environment(2, 0)),
    ("shutdown_ray=True is not supported", lambda: cleanup_dist_env_and_memory(shutdown_ray=True)),
]
for message, call in refused:
    try:
        call()
    except (NotImplementedError, ValueError) as error:
        assert str(error).startswith(message), error
    else:
        raise AssertionError(message)
""".format(model=str(ROOT / "inputs/demo-model")),
        site,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["3 'Where is it?'", "3 'Who'"]
