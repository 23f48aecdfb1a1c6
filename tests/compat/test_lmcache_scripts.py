"""Scripts for LMCache as users write and start them, with `lmcache_vllm` as setup.py installs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.engines import DEMO

pytestmark = pytest.mark.cpu_only

ROOT = Path(__file__).parents[2]
CONFIG = "chunk_size: 256\nlocal_device: cpu\nenable_blending: True\nblend_min_tokens: 32\n"

# What the documentation of LMCache tells its users to write, in our words: everything at the top level of a script.
SCRIPT = """
import time
import torch
import lmcache_vllm
from lmcache_vllm.blend_adapter import (OfflineKVPreCompute,
                                        combine_input_prompt_chunks)
from lmcache_vllm.vllm import LLM, SamplingParams

torch.multiprocessing.set_start_method('spawn')

documents = []
for name in ["chunk1.txt", "chunk2.txt"]:
    with open(name, "r") as file:
        documents.append(file.read())

llm = LLM(model={model!r},
          gpu_memory_utilization=0.7,
          tensor_parallel_size=1)
params = SamplingParams(temperature=0.0, top_p=0.95, max_tokens=30)

print("precompute")
offline_precompute = OfflineKVPreCompute(llm)
for document in documents:
    offline_precompute.precompute_kv(document)
time.sleep(0.1)

prompt = combine_input_prompt_chunks(
    ["Here is a document: ", documents[0], documents[1], "Question: What is it about? Answer: "])
for output in llm.generate(prompt, params):
    text = output.outputs[0].text
    print(f"Newly generated text: {{text!r}}")
    ttft = output.metrics.first_token_time - output.metrics.first_scheduled_time
    print(f"Time to first token: {{ttft:.3f}} seconds")
    print(f"Reused: {{output.num_cached_tokens}}")

one = combine_input_prompt_chunks(["Here is a document: ", documents[0], "Question: What is it about? Answer: "])
two = combine_input_prompt_chunks(["Here is a document: ", documents[1], "Question: What is it about? Answer: "])
print(len(llm.generate([one, two], params)))
lmcache_vllm.close_lmcache_engine()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a user's folder: the script, two texts, a configuration; and `site`, a folder on Python's path."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "site").mkdir()
    for name in ("vllm", "lmcache_vllm"):
        (folder / "site" / name).symlink_to(ROOT / "vllm_blend/compat" / name)
    for name in ("chunk1.txt", "chunk2.txt"):
        (folder / name).write_text((ROOT / "examples" / name).read_text())
    (folder / "kv_blend.py").write_text(SCRIPT.format(model=DEMO))
    (folder / "kv_blend.yaml").write_text(CONFIG)
    return folder


def run(folder: Path, *arguments: str, config: str | None = "kv_blend.yaml") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT)])}
    environment |= {} if config is None else {"LMCACHE_CONFIG_FILE": config}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=folder, capture_output=True, text=True, check=False
    )


def seconds(text: str) -> float:
    found = re.search(r"Time to first token: (\d+\.\d{3}) seconds", text)
    assert found is not None, text
    return float(found[1])


def test_a_script_for_lmcache_runs_as_it_is(folder: Path) -> None:
    done = run(folder, "kv_blend.py")
    assert done.returncode == 0, done.stderr
    begun, text, _, reused, batch = done.stdout.splitlines()
    assert begun == "precompute" and batch == "2"
    assert re.fullmatch(r"Newly generated text: '.+'", text)
    assert 0 < seconds(done.stdout) < 60
    # The first text begins with another token than when it was computed: the space before it is a part of that.
    assert int(reused.split(": ")[1]) > 140
    assert "without effect" not in done.stderr and "Traceback" not in done.stderr


def test_from_the_command_line(folder: Path) -> None:
    question = "Question: What does Tulmaris Works make?\nAnswer:"
    instruction = "You will be asked a question after reading several passages. Answer within five words.\nPassages:\n"
    done = run(
        folder,
        "-m",
        "lmcache_vllm",
        "chunk1.txt",
        "chunk2.txt",
        f"--model={DEMO}",
        f"--instruction={instruction}",
        f"--question={question}",
        "--max-tokens=12",
        "--stop=\n",
        "--max-num-seqs=4",
    )
    assert done.returncode == 0, done.stderr
    text, _, reused = done.stdout.splitlines()
    assert text == "Newly generated text: ' lenses'"
    assert seconds(done.stdout) > 0
    found = re.fullmatch(r"Tokens reused: (\d+) of (\d+)", reused)
    assert found is not None and int(found[1]) > 0.7 * int(found[2])


def test_names_are_where_scripts_look_for_them_and_mistakes_end_a_script_with_the_reason(folder: Path) -> None:
    """One process imports the package, then starts the command without a text, the script without a configuration,
    which runs and says what it leaves out, and the script with a wrong setting."""
    (folder / "wrong.yaml").write_text("enable_blending: True\nblend_recompute_ratio: much\nblend_rat: 1\n")
    code = """
import multiprocessing, os, runpy, sys
import lmcache_vllm
assert lmcache_vllm.__file__.startswith({site!r}), lmcache_vllm.__file__
from lmcache_vllm import close_lmcache_engine
from lmcache_vllm.blend_adapter import OfflineKVPreCompute, append_separator, combine_input_prompt_chunks
assert lmcache_vllm.blend_adapter.OfflineKVPreCompute is OfflineKVPreCompute
assert lmcache_vllm.close_lmcache_engine is close_lmcache_engine
import vllm, vllm_blend
from lmcache_vllm.vllm import LLM, RequestOutput, SamplingParams, TokensPrompt
assert issubclass(LLM, vllm.LLM) and LLM is not vllm.LLM and lmcache_vllm.vllm.LLM is LLM
assert SamplingParams is vllm.SamplingParams and RequestOutput is vllm.RequestOutput
assert set(lmcache_vllm.vllm.__all__) <= set(vllm.__all__)
assert lmcache_vllm.__version__ == vllm_blend.__version__
close_lmcache_engine()
sys.argv = ["lmcache_vllm", "--model=m", "--question=q", "chunk3.txt"]
try:
    runpy.run_module("lmcache_vllm", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert end.code == 2
else:
    raise AssertionError("a text that is not there was no mistake")
print("without a configuration", file=sys.stderr)
runpy.run_path("kv_blend.py", run_name="__main__")
print("with a wrong one", file=sys.stderr)
multiprocessing.set_start_method(None, force=True)  # each script sets it, as if it were alone
os.environ["LMCACHE_CONFIG_FILE"] = "wrong.yaml"
runpy.run_path("kv_blend.py", run_name="__main__")
"""
    done = run(folder, "-c", code.format(site=str(folder / "site")), config=None)
    command, rest = done.stderr.split("without a configuration\n")
    script, wrong = rest.split("with a wrong one\n")
    assert "chunk3.txt cannot be read as text: [Errno 2] No such file" in command and "Traceback" not in command
    assert "enable_blending is off: nothing is precomputed" in script and "Traceback" not in script
    assert "Reused: 0" in done.stdout and seconds(done.stdout) > 0
    assert done.returncode == 1
    assert wrong.splitlines()[-1] == "ValueError: wrong.yaml: blend_recompute_ratio='much' must be a number"
