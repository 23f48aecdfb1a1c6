"""Lay out vLLM's own tests for `run.sh`: `python -m tests.integrations.vllm_own_tests.prepare FOLDER`.

Downloads the source distribution of vLLM from the package index, takes a few folders of tests out of it and puts
stand-ins beside them for the parts of vLLM's test support that they use. Nothing of vLLM is kept in this repository.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tarfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin

from tokenizers.processors import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer

RELEASE = "0.11.2"
FOLDERS = ("tests/entrypoints/llm/", "tests/samplers/", "tests/prompts/", "tests/v1/sample/", "tests/v1/e2e/")
HERE = Path(__file__).resolve().parent
DEMO_MODEL = HERE.parents[2] / "inputs" / "demo-model"
THINK = "<think>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}" + THINK + "{% endif %}"
)


def download(folder: Path) -> Path:
    """Return the source distribution in `folder`, fetched from the package index unless it is there and whole."""
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/vllm/"
    with urllib.request.urlopen(index, timeout=60) as answer:
        links = re.findall(r'href="([^"]+)#sha256=([0-9a-f]{64})"', answer.read().decode())
    [(url, digest)] = {(url, digest) for url, digest in links if url.endswith(f"/vllm-{RELEASE}.tar.gz")}
    path = folder / f"vllm-{RELEASE}.tar.gz"
    if not path.is_file() or _sha256(path) != digest:
        with urllib.request.urlopen(urljoin(index, url), timeout=60) as answer, path.open("wb") as file:
            shutil.copyfileobj(answer, file)
    if _sha256(path) != digest:
        raise ValueError(f"{path} is not what the package index has: delete it and try again")
    return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def unpack(archive: Path, folder: Path) -> None:
    """Put the wanted tests into `folder`/tests, with the stand-ins."""
    shutil.rmtree(folder / "tests", ignore_errors=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.partition("/")[2]
            if member.isfile() and name.startswith(FOLDERS):
                member.name = name
                tar.extract(member, folder, filter="data")
    tests = folder / "tests"
    vision = tests / "entrypoints" / "openai"
    vision.mkdir()
    for path in (tests, tests / "entrypoints", vision, tests / "v1"):
        (path / "__init__.py").touch()
    shutil.copy(HERE / "support.py", tests / "conftest.py")
    shutil.copy(HERE / "support.py", tests / "utils.py")
    shutil.copy(HERE / "support.py", vision / "test_vision.py")
    (tests / "pytest.ini").write_text("[pytest]\nmarkers =\n    skip_v1\n    skip_global_cleanup\n")


def make_model(folder: Path) -> None:
    """Write the demo model with a chat template and a token that the templates of reasoning models write, in two
    folders: a tokenizer that puts BOS before a text, and one that does not."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_tokens([THINK])
    tokenizer.chat_template = TEMPLATE
    model.resize_token_embeddings(len(tokenizer))
    for name in ("model", "model-without-bos"):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        tokenizer.backend_tokenizer.post_processor = ByteLevel()  # as GPT-2's: nothing is put before a text


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    unpack(download(target), target)
    make_model(target)
