"""An interpreter that has a stand-in for vLLM, whose `generate` does what the prompt's length says."""

from __future__ import annotations

import sys
from pathlib import Path

RAISES, HANGS, DIES = 101, 102, 103  # tokens of a prompt

PACKAGE = f"""
import os, time, types

__version__ = "9.9"

class SamplingParams:
    def __init__(self, **options):
        self.options = options

class LLM:
    def __init__(self, model, **options):
        if options.get("kv_cache_dtype") == "fp9":
            raise ValueError("kv_cache_dtype 'fp9' is unknown")

    def generate(self, prompts, params, use_tqdm):
        assert use_tqdm is False and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        outputs = []
        for prompt, each in zip(prompts, params):
            length = len(prompt["prompt_token_ids"])
            if length == {RAISES}:
                raise RuntimeError("out of memory")
            if length == {HANGS}:
                time.sleep(3600)
            if length == {DIES}:
                os.write(2, b"a line before\\nkilled by a signal of its own\\n")
                os._exit(7)
            time.sleep(0.002)
            answer = types.SimpleNamespace(token_ids=[1] * each.options["max_tokens"])
            outputs.append(types.SimpleNamespace(outputs=[answer], finished=True))
        return outputs
"""


def write_interpreter(folder: Path) -> Path:
    """Write a program that runs this Python with the stand-in, and without this checkout; return its path."""
    site = folder / "site"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(PACKAGE)
    (site / "torch.py").write_text('import types\n__version__ = "9.8"\nversion = types.SimpleNamespace(cuda="9.7")\n')
    (site / "vllm-9.9.dist-info").mkdir()
    (site / "vllm-9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" "$@"\n')
    program.chmod(0o755)
    return program
