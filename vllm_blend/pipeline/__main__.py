"""Run a stage of the pipeline by its name, or say which stages there are."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module

STAGES = {
    "run_pipeline": "run retrieval, KV caching and decoding in one process",
    "retrieval": "1. find the best passages of every question",
    "build_kv_cache": "2. compute and store the KV of every passage",
    "speculative_decode": "3. answer questions over the stored KV, and trace every step",
    "evaluate": "score predictions against their answers",
    "token_budget_calculator": "compute how many chunks of KV fit into given memory",
}


def usage() -> str:
    """Return what the stages are and how to run them."""
    width = max(map(len, STAGES))
    lines = ["usage: python -m vllm_blend.pipeline STAGE [flags]", ""]
    lines += ["Run a stage of the RAG pipeline; `STAGE --help` explains its flags. The stages:", ""]
    lines += [f"  {name:{width}}  {what}" for name, what in STAGES.items()]
    lines += ["", "To begin with, from the project root: python -m vllm_blend.pipeline run_pipeline --max-samples 20"]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage that the first argument names with the others. Return 2 if it names none."""
    stage, *flags = [*(sys.argv[1:] if argv is None else argv)] or [""]
    if stage in ("-h", "--help"):
        print(usage())
        return 0
    if stage not in STAGES:
        close = difflib.get_close_matches(stage, STAGES, n=1)
        meant = f": did you mean {close[0]}?" if close else ""
        error = f"error: there is no stage {stage!r}{meant}" if stage else "error: name a stage"
        print(f"{usage()}\n\n{error}", file=sys.stderr)
        return 2
    sys.argv = [f"python -m vllm_blend.pipeline {stage}", *flags]  # the stage's usage shows this name
    import_module(f"vllm_blend.pipeline.{stage}").main(flags)
    return 0


if __name__ == "__main__":
    sys.exit(main())
