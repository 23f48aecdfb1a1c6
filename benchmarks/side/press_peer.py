"""NVIDIA's kvpress as a peer: its presses answer the questions of a benchmark, under an interpreter that has it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("press_worker.py")
PRESSES = {  # by the metric of this project that scores by the same idea
    "expected_attention": "ExpectedAttentionPress",
    "keydiff": "KeyDiffPress",
    "knorm": "KnormPress",
    "random": "RandomPress",
    "snapkv": "SnapKVPress",
    "streaming_llm": "StreamingLLMPress",
}
Answers = list[tuple[str, list[int]]]  # text and token ids of every prompt


def ask(
    python: Path, model: str, prompts: Sequence[list[int]], runs: Sequence[tuple[str | None, float]], **limits: Any
) -> tuple[dict[str, str], list[Answers]]:
    """Return the peer's versions, and the answers of each run: a press (None: nothing is evicted) and the share of KVs
    that it keeps. `limits` are `max_tokens` and `stop`.

    Raises ValueError with the end of the worker's output if the interpreter cannot run it.
    """
    job = {"model": str(Path(model).absolute()), "prompts": prompts, "runs": runs} | limits
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(python.absolute()), str(WORKER)]
    try:
        done = subprocess.run(command, input=json.dumps(job), env=environment, capture_output=True, text=True)
    except OSError as error:
        raise ValueError(f"--kvpress-python {python}: {error}; give an interpreter that has kvpress") from error
    if done.returncode:
        raise ValueError(f"--kvpress-python {python} failed with status {done.returncode}: {done.stderr[-1500:]}")
    versions, *answers = (json.loads(line) for line in done.stdout.splitlines())
    return versions, [[(text, ids) for text, ids in run] for run in answers]
