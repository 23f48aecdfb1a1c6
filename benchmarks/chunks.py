"""Measure the time to first token of compositions of registered chunks, against the same prompt without any cache.

    python -m benchmarks.chunks                                  # the demo model, 900 tokens
    python -m benchmarks.chunks --shape 7b --tokens 4096 8192    # random weights in bf16, on a GPU

The times are medians of one request at a time. "no cache": mode "exact", nothing cached. "first": the first question
over a blended composition whose chunks are registered. "second": another question over it, its pages retained ("exact":
in the prefix cache). Registering is measured too: chunks a second, one after another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.samples import record
from benchmarks.shapes import MISTRAL_7B
from vllm_blend import ChunkedLLM, RequestOutput, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
DEMO = str(ROOT / "inputs" / "demo-model")
FIRST = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
QUESTION = 24  # tokens


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO)
    parser.add_argument("--shape", choices=["7b"], help="random weights of this shape instead of a model")
    parser.add_argument("--tokens", nargs="*", type=int, default=[900])
    parser.add_argument("--chunk-tokens", type=int, help="tokens of a chunk (default: an eighth of the prompt)")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args(argv)
    chunked = load(args.model, args.shape)
    device = chunked.llm_engine.model_executor.driver_worker.device
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} thread(s)"
    print(f"{args.shape or Path(args.model).name}, {name}, torch {torch.__version__}\n")
    print("| prompt tokens | no cache | first, 15% | second | second, exact | speed-up of the second | register |")
    print("|---|---|---|---|---|---|---|")
    for tokens in args.tokens:
        print(row(chunked, tokens, args.chunk_tokens or tokens // 8, args.repeats), flush=True)


def load(model: str, shape: str | None) -> ChunkedLLM:
    options: dict[str, Any] = {"max_num_seqs": 8, "blend_recompute_ratio": 0.15}
    if shape is None:
        return ChunkedLLM(model, **options)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MISTRAL_7B))
        return ChunkedLLM(folder, tokenizer=DEMO, load_format="dummy", **options)


def row(chunked: ChunkedLLM, tokens: int, chunk_tokens: int, repeats: int) -> str:
    vocabulary = min(chunked.llm_engine.hf_config.vocab_size, 2000)
    generator = random.Random(tokens)

    def ids(count: int) -> list[int]:
        return [generator.randrange(10, vocabulary) for _ in range(count)]

    room = tokens - QUESTION - 1
    sizes = [chunk_tokens] * (room // chunk_tokens) + ([room % chunk_tokens] if room % chunk_tokens else [])
    chunked.register_chunk(ids(chunk_tokens))  # warm up
    start = time.perf_counter()
    chunks = [chunked.register_chunk(ids(size)).id for size in sizes]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    registering = (time.perf_counter() - start) / len(chunks)
    orders = itertools.permutations(chunks)

    def ask(order: tuple[str, ...], **options: Any) -> RequestOutput:
        output: RequestOutput = chunked.generate_from_chunks(
            None, order, query=ids(QUESTION), sampling_params=FIRST, **options
        )
        return output

    def median(times: list[float]) -> float:
        return statistics.median(times[2:])

    exact: list[float] = []
    second_exact: list[float] = []
    new: list[float] = []
    second: list[float] = []
    for _ in range(repeats + 2):
        order = next(orders)
        chunked.llm.reset_prefix_cache()
        for times in (exact, second_exact):
            times.append(ttft(ask(order, mode="exact")))
        for times, retained in ((new, False), (second, True)):
            output = ask(order, retain=True)
            assert output.blend is not None and output.blend.retained is retained
            times.append(ttft(output))
    kinds = {"no cache": exact, "first, 15%": new, "second": second, "second, exact": second_exact}
    for name, times in kinds.items():
        record(f"{tokens} tokens, {name}", times[2:])
    ms = [f"{1000 * median(times):.1f} ms" for times in (exact, new, second, second_exact)]
    for chunk in chunks:
        chunked.delete_chunk(chunk)
    rate = f"{1000 * registering:.1f} ms / {chunk_tokens} tokens"
    return f"| {tokens} | {' | '.join(ms)} | {median(exact) / median(second):.1f}x | {rate} |"


def ttft(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_time is not None and metrics.first_scheduled_time is not None
    return metrics.first_token_time - metrics.first_scheduled_time


if __name__ == "__main__":
    main()
