"""Time a decode step of a batch that shares its beginning, with and without cascade attention.

    python -m benchmarks.cascade_gpu [--batch 64] [--shared 8192] [--own 64]
    OMP_NUM_THREADS=1 python -m benchmarks.cascade_gpu --device cpu --batch 4 16 64 --shared 800 --own 16

Random weights in a 7B model's shape, bf16, CUDA graphs on; on a CPU, the demo model in float32. Every request has
the same `--shared` tokens before `--own` of its own; the shared pages are found by the exact prefix cache. Times are
medians over the steps of one batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.engine_gpu import TOKENIZER
from benchmarks.shapes import MISTRAL_7B
from vllm_blend import LLM, SamplingParams


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[64])
    parser.add_argument("--shared", type=int, nargs="*", default=[8192])
    parser.add_argument("--own", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    args = parser.parse_args(argv)
    times: dict[bool, dict[tuple[int, int], float]] = {}
    for cascade in (False, True):
        llm = (load if args.device == "cuda" else load_demo)(max(args.batch), max(args.shared) + args.own, cascade)
        times[cascade] = {
            (batch, shared): step_time(llm, batch, shared, args.own, args.steps)
            for batch in args.batch
            for shared in args.shared
        }
        del llm
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    where = f"{torch.get_num_threads()} threads of a CPU", "demo model in float32"
    if args.device == "cuda":
        where = torch.cuda.get_device_name(), "7B shape in bf16"
    print(f"\n{where[0]}, torch {torch.__version__}, {where[1]}, {args.own} own tokens each\n")
    print("| batch | shared tokens | plain, ms a step | cascade, ms a step | ratio |")
    print("|---|---|---|---|---|")
    for case, plain in times[False].items():
        ours = times[True][case]
        print(f"| {case[0]} | {case[1]} | {1e3 * plain:.2f} | {1e3 * ours:.2f} | {ours / plain:.2f}x |")


def load_demo(batch: int, tokens: int, cascade: bool) -> LLM:
    return LLM(TOKENIZER, max_num_seqs=batch, device="cpu", cascade_attention=cascade)


def load(batch: int, tokens: int, cascade: bool) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MISTRAL_7B))
        start = time.perf_counter()
        llm = LLM(
            folder,
            tokenizer=TOKENIZER,
            load_format="dummy",
            device="cuda",
            max_num_seqs=batch,
            max_model_len=tokens + 1024,
            attention_backend="cuda",
            cascade_attention=cascade,
        )
        print(f"cascade_attention={cascade}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
        return llm


def step_time(llm: LLM, batch: int, shared: int, own: int, steps: int) -> float:
    generator = random.Random(batch)

    def ids(count: int) -> list[int]:
        return [generator.randrange(10, 2000) for _ in range(count)]

    beginning = ids(shared)
    first = SamplingParams(temperature=0, max_tokens=1)
    llm.generate({"prompt_token_ids": [*beginning, *ids(own)]}, first, use_tqdm=False)
    engine, params = llm.llm_engine, SamplingParams(temperature=0, max_tokens=steps + 40, ignore_eos=True)
    for index in range(batch):
        engine.add_request(str(index), {"prompt_token_ids": [*beginning, *ids(own)]}, params)
    while engine.scheduler.waiting or any(not request.output_token_ids for request in engine.scheduler.running):
        engine.step()
    for _ in range(5):
        engine.step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
    engine.abort_request([str(index) for index in range(batch)])
    while engine.has_unfinished_requests():
        engine.step()
    median = statistics.median(seconds)
    print(f"batch {batch}, {shared} shared: {1e3 * median:.2f} ms a step", flush=True)
    return median


if __name__ == "__main__":
    main()
