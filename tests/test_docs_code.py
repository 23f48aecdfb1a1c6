"""The Python blocks of the pages run as they stand there, and every block is run by some test."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from tests.engine.engines import DEMO, engine, greedy, tiny_model
from vllm_blend import LLM, ChunkedPrompt
from vllm_blend.blend.selectors import SELECTORS
from vllm_blend.entrypoints.serve import parse

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
LINE = re.compile(r"(?m)^    LLM\(model, (.+?)\)(?: +#.*)?$")  # the options of a feature, at the beginning of its page
# What each page's Python blocks, which make one program, print among other things.
PRINTED = {
    "architecture.md": [],
    "async_llm.md": ["lenses"],
    "chunk_api.md": ["lenses"],
    "chunks.md": ["lenses", "BlendStats("],
    "offline.md": ["lenses"],
    "structured_outputs.md": [],
}
# Blocks that other tests run, or that cannot run as they stand.
ELSEWHERE = {
    ("README.md", "python"): "tests/test_readme.py",
    ("models.md", "python"): "tests/models/test_gguf.py",
    ("operations.md", "python"): "tests/test_docs.py",
    ("store_format.md", "python"): "tests/test_docs.py",
    ("pipeline.md", "bash"): "tests/pipeline/test_own_data.py",
    ("integrations.md", "python"): "tests/integrations/check_langchain.py",
    ("hooks.md", "python"): "tests/blend/test_seed_hooks.py",  # an outline with `...`; examples/blend_hooks.py is whole
    ("rag_stacks.md", "python"): "tests/integrations/check_rag_stacks.py",
    ("ray.md", "python"): "tests/ray/test_app.py",  # what it serves needs Ray: tests/ray/run.sh starts it
    ("server.md", "python"): "tests/entrypoints/openai",  # needs a server and the client, which those start
    ("server.md", "yaml"): "tests/test_docs_code.py",
}


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def test_every_block_is_run_by_a_test() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = {(page.name, language) for page in pages for language, _ in blocks(page)}
    assert found == {*ELSEWHERE, *((name, "python") for name in PRINTED)}
    assert [path for path in ELSEWHERE.values() if not (ROOT / path).exists()] == []


@pytest.mark.cpu_only
def test_the_blocks_of_every_page_run() -> None:
    """One process imports the package once, and runs each page as a program that knows nothing of the others."""
    programs = {
        name: "\n".join(text for language, text in blocks(ROOT / "docs" / name) if language == "python")
        for name in PRINTED
    }
    runner = (
        "for name, code in PROGRAMS.items():\n"
        "    print(f'\\n== {name}', flush=True)\n"
        "    exec(compile(code, name, 'exec'), {'__name__': '__main__'})\n"
    )
    command = [sys.executable, "-c", f"PROGRAMS = {programs!r}\n{runner}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    printed = dict(part.split("\n", 1) for part in re.split(r"(?m)^== ", done.stdout)[1:])
    assert printed.keys() == PRINTED.keys()
    missing = [(name, text) for name, texts in PRINTED.items() for text in texts if text not in printed[name]]
    assert missing == []


def test_the_servers_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [text] = [text for language, text in blocks(ROOT / "docs" / "server.md") if language == "yaml"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "server.yaml").write_text(text)
    (tmp_path / "keys.txt").write_text("key\n")
    engine_args, options = parse(["--config", "server.yaml"])
    given = yaml.safe_load(text)
    assert engine_args.model == given["model"] and engine_args.max_model_len == given["max-model-len"]
    assert options.max_queued_requests == given["max-queued-requests"]


def test_no_block_of_python_escapes_by_its_indentation() -> None:
    """A program is a block between fences. Indented are commands, outputs, and lines that name a feature's options."""
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        plain = BLOCK.sub("", page.read_text(encoding="utf-8"))
        assert re.findall(r"(?m)^    (?:from \w|import \w|def |class |@).*", plain) == [], page.name


FEATURES = [
    (page.name, options) for page in sorted((ROOT / "docs").glob("*.md")) for options in LINE.findall(page.read_text())
]


def test_features_have_a_line() -> None:
    expected = {"cascade", "kv_cache", "kv_compress", "offload", "speculative_decoding", "stores"}
    assert expected <= {page.removesuffix(".md") for page, _ in FEATURES}


@pytest.mark.cpu_only
@pytest.mark.parametrize(("page", "options"), FEATURES, ids=lambda text: text.partition("=")[0])
def test_the_options_at_the_beginning_of_a_page_start_an_engine(page: str, options: str, tmp_path: Path) -> None:
    given = eval(f"dict({options.replace('/var/cache', str(tmp_path))})")
    with LLM(tiny_model("llama"), device="cpu", num_gpu_blocks_override=32, **given) as llm:
        [output] = llm.generate([list(range(5, 40))], greedy(2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2


def test_the_selector_of_the_page_on_architecture_chooses_what_it_says() -> None:
    [(_, code)] = blocks(ROOT / "docs" / "architecture.md")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(code, "docs/architecture.md", "exec"), names)
    chunks = [list(range(20, 30)), list(range(30, 40))]
    with patch.dict(SELECTORS), engine(DEMO, enable_blending=True) as llm:
        SELECTORS.register(names["FarTokens"])
        for order in (chunks, chunks[::-1]):
            prompt: ChunkedPrompt = {"prefix": [5, 6], "chunks": order, "suffix": [7, 8]}
            prompt |= {"blend_selector": "far_tokens", "blend_recompute_ratio": 0.4}
            [output] = llm.generate(prompt, greedy(1), use_tqdm=False)
    # The chunk behind the prefix stands where it was encoded; of the other, the last tokens are computed.
    assert output.blend is not None and re.fullmatch(r"e{12}r+c+cc", output.blend.token_kinds)
