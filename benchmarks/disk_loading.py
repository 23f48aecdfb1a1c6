"""Measure the time to first token of a prompt whose chunks are on the disk: loaded first, or while it is computed.

    python -m benchmarks.disk_loading [--mib-per-second 50]

One prompt of a few long chunks runs at a time, with nothing in memory but the weights. `memory` is the same prompt with
its chunks in memory, `whole` waits for whole chunks, `layers` computes while the layers arrive. The three alternate.
With `question_attention` the question sees every layer before the prompt is computed, so that little overlaps.
`--mib-per-second` slows the disk down, by waiting in the reading threads.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.samples import record
from vllm_blend import LLM, SamplingParams
from vllm_blend.kv_store.segment import Extent, SegmentFiles

FIRST_TOKEN = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


class SlowDisk:
    """Reads through one line with a given number of bytes a second."""

    def __init__(self, files: SegmentFiles, rate: float) -> None:
        self._read, self._rate = files.read, rate
        self._lock, self._free = threading.Lock(), 0.0

    def read(self, extent: Extent, start: int, into: torch.Tensor) -> None:
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + len(into) / self._rate
            until = self._free
        self._read(extent, start, into)
        time.sleep(max(0.0, until - time.perf_counter()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inputs/demo-model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=320, help="tokens of a chunk")
    parser.add_argument("--selector", default="value_deviation")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mib-per-second", type=float)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(
            args.model, dtype=args.dtype, enable_blending=True, blend_selector=args.selector, chunk_store_path=folder
        )
        store, composer = llm.llm_engine.chunk_store, llm.llm_engine.composer
        assert store.below
        disk: Any = store.below[0].storage
        ids = torch.randint(10, 500, (args.chunks, args.tokens), generator=torch.manual_seed(0)).tolist()
        prompt: Any = {"prefix": ids[0][:8], "chunks": ids, "suffix": ids[0][8:24]}
        llm.generate(prompt, FIRST_TOKEN, use_tqdm=False)
        if not store.flush(60):
            raise RuntimeError("the disk did not take the chunks in time")
        size = store.num_bytes
        if args.mib_per_second:
            disk.space.files.read = SlowDisk(disk.space.files, args.mib_per_second * 2**20).read
        start_early = composer.start_early
        composer.num_early = 0
        times: dict[str, list[float]] = {"memory": [], "whole": [], "layers": []}
        for _ in range(args.rounds):
            for how, found in times.items():
                if how != "memory":
                    store.clear()
                composer.start_early = start_early if how == "layers" else lambda: False  # type: ignore[method-assign]
                [output] = llm.generate(prompt, FIRST_TOKEN, use_tqdm=False)
                metrics = output.metrics
                assert metrics is not None and metrics.first_token_time and metrics.first_scheduled_time
                found.append(metrics.first_token_time - metrics.first_scheduled_time)
        for how, found in times.items():
            record(how, found)
        early = composer.num_early  # the others found their chunks whole, as the disk was faster than a step
        print(
            f"{args.chunks} chunks of {args.tokens} tokens, {size / 2**20:.1f} MiB; {args.selector}; "
            f"disk {args.mib_per_second or 'as it is'} MiB/s; median of {args.rounds}, ms to the first token: "
            + ", ".join(f"{how} {1e3 * statistics.median(found):.1f}" for how, found in times.items())
            + f"; {early} of {args.rounds} began before their last layer was there"
        )


if __name__ == "__main__":
    main()
