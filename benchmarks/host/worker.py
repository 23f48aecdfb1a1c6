"""Measure one checkout's host time in this process: started by `benchmarks.host_time`, which names the checkout.

The first argument is a JSON spec, the second a file descriptor for the samples. PYTHONPATH has the checkout and this
folder. Times are CPU times of whole processes by the kernel's clocks (Linux), so what other programs do counts little.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from host_stand_in import Settings  # by PYTHONPATH

from vllm_blend import LLM, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams
from vllm_blend.engine.llm_engine import LLMEngine

MAX_MODEL_LEN = 4096
EDGE = 8  # steps at the beginning and the end of a run that are left out: requests come and go there


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of another process so far: the clock that `clock_getcpuclockid` names. Linux only."""
    return time.clock_gettime((~pid << 3) | 2)


class Steps:
    """Notes the clocks after every step of an engine in this process."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []
        step = LLMEngine.step

        def noted(engine: LLMEngine) -> Any:
            outputs = step(engine)
            self.marks.append((time.process_time(), time.perf_counter()))
            return outputs

        LLMEngine.step = noted  # type: ignore[method-assign]


def prompts(spec: dict[str, Any], run: int) -> list[Any]:
    """Return prompts that no run before had."""
    rng = Random(f"{spec['seed']}-{run}")
    ids = spec["token_ids"]
    return [{"prompt_token_ids": rng.choices(ids, k=spec["prompt"])} for _ in range(spec["requests"])]


def options(spec: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the options of an engine whose device takes so many seconds a step."""
    blocks = max(MAX_MODEL_LEN // 16 + 2, 2 * spec["requests"] * ((spec["prompt"] + spec["tokens"]) // 16 + 2))
    return {
        "model": spec["model"],
        "load_format": "dummy",
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": spec["requests"],
        "max_num_batched_tokens": max(8192, spec["requests"]),
        "num_gpu_blocks_override": blocks,
        "async_scheduling": True,
        "seed": spec["seed"],
        "hf_overrides": Settings(spec["token_ids"], seconds, spec["seed"]),
    }


def params(spec: dict[str, Any], **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=spec["tokens"], ignore_eos=True, **{"temperature": 0, **spec["params"], **fields})


def offline(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Return CPU and wall milliseconds of a decode step of `LLM.generate`, a sample for each run."""
    steps, llm = Steps(), LLM(**options(spec, 0.0))
    found: dict[str, list[float]] = {"offline_cpu": [], "offline_wall": []}
    for run in range(spec["repeats"] + 1):
        steps.marks.clear()
        gc.collect()
        outputs = llm.generate(prompts(spec, run), params(spec), use_tqdm=False)
        assert all(len(output.outputs[0].token_ids) == spec["tokens"] for output in outputs)
        window = steps.marks[EDGE:-EDGE]
        for name, (first, last) in zip(found, zip(window[0], window[-1], strict=True), strict=True):
            if run:  # the first warms up
                found[name].append(1e3 * (last - first) / (len(window) - 1))
    llm.shutdown()
    return found


async def streaming(spec: dict[str, Any]) -> dict[str, list[float]]:
    """Return what a decode step costs of `AsyncLLM` streams: CPU milliseconds of the engine's process and of this one,
    the wall's, and how many tokens an output has (1: every step reaches every stream by itself)."""
    llm = AsyncLLM.from_engine_args(EngineArgs(**options(spec, spec["device_ms"] / 1e3)))
    names = ("stream_engine_cpu", "stream_server_cpu", "stream_wall", "stream_tokens_an_output")
    found: dict[str, list[float]] = {name: [] for name in names}
    kind = params(spec, output_kind=RequestOutputKind.DELTA)
    total = spec["requests"] * spec["tokens"]
    edge = spec["requests"] * EDGE
    pid = llm.engine_pid
    assert pid is not None
    for run in range(spec["repeats"] + 1):
        seen, num_outputs = 0, [0]
        marks: list[tuple[float, ...]] = []

        def mark(seen: int, marks: list[tuple[float, ...]] = marks, num_outputs: list[int] = num_outputs) -> None:
            marks.append((cpu_seconds(pid), time.process_time(), time.perf_counter(), num_outputs[0], seen))

        async def one(number: int, prompt: Any, run: int = run, num_outputs: list[int] = num_outputs) -> None:
            nonlocal seen
            async for output in llm.generate(prompt, kind, request_id=f"{run}-{number}"):
                before, seen = seen, seen + len(output.outputs[0].token_ids)
                num_outputs[0] += 1
                if before < edge <= seen or before < total - edge <= seen:
                    mark(seen)

        gc.collect()
        await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts(spec, run))))
        assert seen == total
        first, last = marks
        steps = (last[4] - first[4]) / spec["requests"]
        if run:
            for name, start, stop in zip(names, first, last, strict=False):
                found[name].append(1e3 * (stop - start) / steps)
            found[names[3]][-1] = (last[4] - first[4]) / (last[3] - first[3])
    llm.shutdown()
    return found


def main() -> None:
    spec, descriptor = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2])
    found: dict[str, list[float]] = {}
    if "offline" in spec["modes"]:
        found |= offline(spec)
    if "streaming" in spec["modes"]:
        found |= asyncio.run(streaming(spec))
    rounded = {name: [round(value, 4) for value in each] for name, each in found.items()}
    os.write(descriptor, json.dumps(rounded).encode())


if __name__ == "__main__":
    main()
