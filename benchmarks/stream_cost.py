"""Measure what streams cost the engine's loop, in CPU time per step of the engine's process.

The engine runs as many `AsyncLLM` streams as a step takes, and beside it `LLM.generate` the same prompts without text.

    OMP_NUM_THREADS=1 python -m benchmarks.stream_cost --output stream_cost.json

Both run the same batches of the same tokens, in turn and `--repeats` times; the CPU time is that of the process in
which the steps run, by the kernel's counters (Linux), so that other processes and a busy machine count for little. The
time of the first prefill is in both. A stream's outputs are `DELTA`, with their text, taken up by this process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from benchmarks.server_watch import find_engine
from vllm_blend import LLM, AsyncLLM, EngineArgs, RequestOutputKind, SamplingParams

TICK = 1e3 / os.sysconf("SC_CLK_TCK")


def engine_cpu_ms(pid: int) -> float:
    """Return the CPU time of a process's threads so far, in ms. Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) * TICK


def prompts_of(args: argparse.Namespace, run: int) -> list[dict[str, list[int]]]:
    """Return prompts that no run before had, so that no prefix cache helps either side."""
    rng = Random(f"{args.seed}-{run}")
    return [{"prompt_token_ids": [rng.randrange(10, 2000) for _ in range(16)]} for _ in range(args.streams)]


def params(args: argparse.Namespace, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, **fields)


def offline_ms(llm: LLM, args: argparse.Namespace, run: int) -> float:
    """Return the CPU time of a run in this process, in ms."""
    begun = time.process_time()
    outputs = llm.generate(prompts_of(args, run), params(args, detokenize=False), use_tqdm=False)  # type: ignore[arg-type]
    assert all(len(output.outputs[0].token_ids) == args.tokens for output in outputs)
    return 1e3 * (time.process_time() - begun)


async def streams_ms(llm: AsyncLLM, pid: int, args: argparse.Namespace, run: int) -> float:
    """Return the CPU time of the engine's process while the streams run, in ms."""
    begun = engine_cpu_ms(pid)

    async def one(number: int, prompt: Any) -> int:
        kind = params(args, output_kind=RequestOutputKind.DELTA)
        outputs = llm.generate(prompt, kind, request_id=f"{run}-{number}")
        return sum([len(output.outputs[0].token_ids) async for output in outputs])

    counts = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts_of(args, run))))
    assert counts == [args.tokens] * args.streams
    return engine_cpu_ms(pid) - begun


async def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the CPU ms per step of each run, by side."""
    options: dict[str, Any] = {"model": args.model, "device": "cpu", "max_num_seqs": args.streams}
    options |= {"num_gpu_blocks_override": 2 * args.streams * (args.tokens // 16 + 2), "seed": args.seed}
    offline = LLM(**options)
    streaming = AsyncLLM.from_engine_args(EngineArgs(**options))
    found: dict[str, list[float]] = {"LLM.generate": [], "AsyncLLM streams": []}
    try:
        await streaming.check_health()
        pid = find_engine(os.getpid())
        assert pid is not None
        for run in range(args.repeats + 1):
            pair = offline_ms(offline, args, run), await streams_ms(streaming, pid, args, run)
            if run:  # the first warms up
                for side, milliseconds in zip(found, pair, strict=True):
                    found[side].append(round(milliseconds / args.tokens, 3))
    finally:
        streaming.shutdown()
    return found


def table(found: Mapping[str, Sequence[float]]) -> str:
    lines = ["| side | CPU ms per step, median | least | most |", "|---|---|---|---|"]
    lines += [f"| {side} | {median(each):.2f} | {min(each):.2f} | {max(each):.2f} |" for side, each in found.items()]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inputs/demo-model")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of every answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a JSON file for all runs")
    args = parser.parse_args(argv)
    found = asyncio.run(measure(args))
    print(table(found))
    if args.output:
        settings = vars(args) | {"output": str(args.output)}
        args.output.write_text(json.dumps({"settings": settings, "cpu_ms_per_step": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
