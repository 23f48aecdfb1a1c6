"""Measure what evicting KV gains in throughput: many long requests on a small pool, uncompressed and compressed.

    bash scripts/build_cuda.sh && python -m benchmarks.kv_compress [--variants uncompressed 1x 8x 64x] [--requests 256]
        [--results FILE.jsonl] [--markdown FILE]
    python -m benchmarks.kv_compress --small          # on a CPU, a tiny shape: whether it works, not how fast

Llama-3.1-8B's shape with random weights, bf16, 256 requests of 6000 tokens in and 500 out, greedy, on a KV pool of 24
GiB (for the compressed engines, it includes the metric and position of every KV). "8x" keeps an eighth of the KVs. All
requests arrive at once; every engine is built anew. A row is printed as soon as it is measured, and goes to --results,
where a later run finds the uncompressed row that ratios need: so a short session can measure one variant at a time.

"tok/s" includes prefill, which eviction does not speed up: 256 x 6000 tokens through 8B parameters are 24.6 PFLOP, some
35 s of an H200 in every variant. "decode tok/s" counts the steps in which no prompt is computed. "concurrent" is the
most requests that were decoding at once, "compressing" the share of the time in which the engine compresses, with the
device waited for.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import LLAMA_31_8B
from vllm_blend import LLM, SamplingParams
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.features.kv_compress.extension import KVCompression

TOKENIZER = str(Path(__file__).resolve().parents[1] / "inputs" / "demo-model")
VARIANTS = {"uncompressed": None, "1x": 1.0, "8x": 1 / 8, "64x": 1 / 64}
TINY = LLAMA_31_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Work:
    """The work of every engine."""

    config: dict[str, Any]
    requests: int
    tokens_in: int
    tokens_out: int
    pool_bytes: int
    options: dict[str, Any]
    compression: dict[str, Any]

    @property
    def name(self) -> str:
        """Return a name: rows of the same name may be compared."""
        hidden, gib = self.config["hidden_size"], self.pool_bytes / 2**30
        return f"hidden {hidden}, {self.requests} x {self.tokens_in} in, {self.tokens_out} out, {gib:.4g} GiB"

    def blocks(self, compressed: bool) -> int:
        """Return how many blocks the pool holds, beside the one that is padding."""
        config, size = self.config, self.options["block_size"]
        itemsize = getattr(torch, config["torch_dtype"]).itemsize
        kvs = config["num_hidden_layers"] * config["num_key_value_heads"] * size
        count: int = self.pool_bytes // (kvs * (2 * config["head_dim"] * itemsize + (8 if compressed else 0))) + 1
        return count


@dataclass(frozen=True)
class Row:
    """The measurements of one engine's run."""

    work: str
    variant: str
    seconds: float
    tokens: int
    decode_seconds: float  # of steps in which no prompt was computed
    decode_tokens: int
    concurrent: int
    compressing: float  # seconds
    compressions: int
    preemptions: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def decode_rate(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else float("nan")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny shape on a CPU")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--requests", type=int, help="requests (256); shrink --pool-gib by the same factor")
    parser.add_argument("--tokens-in", type=int)
    parser.add_argument("--tokens-out", type=int)
    parser.add_argument("--pool-gib", type=float)
    parser.add_argument("--metric", default="kv_compress")
    parser.add_argument("--interval", type=int, help="kvc_interval; 128 is the engine's default")
    parser.add_argument("--new-token-limit", type=int, help="new_token_limit: all requests are compressed together")
    parser.add_argument("--backend", default="auto", help="attention_backend")
    parser.add_argument("--results", type=Path, help="rows of this run go here, and those of earlier ones are read")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    work = described(args)
    rows = earlier(args.results, work)
    print(f"{work.name}; {work.blocks(False) - 1} blocks, compressed {work.blocks(True) - 1}", flush=True)
    for variant in args.variants:
        row = measure(work, variant)
        rows[variant] = row
        print(line(row, rows.get("uncompressed")), flush=True)
        if args.results:
            with args.results.open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    table = markdown(work, rows, args.metric)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n")


def described(args: argparse.Namespace) -> Work:
    """Return the work that the arguments ask for."""
    small = args.small
    tokens_in, tokens_out = args.tokens_in or (96 if small else 6000), args.tokens_out or (24 if small else 500)
    requests = args.requests or (10 if small else 256)
    pool_gib = args.pool_gib or (0.0002 if small else 24)
    options: dict[str, Any] = {
        "block_size": 16,
        "max_num_seqs": min(requests, 256),
        "max_model_len": -(-(tokens_in + tokens_out) // 16) * 16,
        "max_num_batched_tokens": 128 if small else 8192,
        "enable_prefix_caching": False,
        "attention_backend": args.backend,
        "device": "cpu" if small else "cuda",
    }
    compression: dict[str, Any] = {"enable_kvc": True, "kvc_metric": args.metric}
    if small:
        compression |= {"protected_window_size": 6, "num_sinks": 2, "kvc_interval": 8}
    if args.interval:
        compression["kvc_interval"] = args.interval
    if args.new_token_limit:
        compression["new_token_limit"] = args.new_token_limit
    config = TINY if small else LLAMA_31_8B
    return Work(config, requests, tokens_in, tokens_out, int(pool_gib * 2**30), options, compression)


def earlier(results: Path | None, work: Work) -> dict[str, Row]:
    """Return the newest row of every variant of this work that an earlier run has left."""
    if results is None or not results.exists():
        return {}
    rows = [Row(**json.loads(text)) for text in results.read_text().splitlines()]
    return {row.variant: row for row in rows if row.work == work.name}


def measure(work: Work, variant: str) -> Row:
    rate = VARIANTS[variant]
    options = dict(work.options)
    if rate is not None:
        options |= work.compression | {"target_compression_rate": rate}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(work.config))
        start = time.perf_counter()
        blocks = work.blocks(compressed=rate is not None)
        llm = LLM(folder, tokenizer=TOKENIZER, load_format="dummy", num_gpu_blocks_override=blocks, **options)
        print(f"{variant}: loaded in {time.perf_counter() - start:.1f} s", flush=True)
    rng = random.Random(0)
    vocabulary = work.config["vocab_size"]
    warm = [[rng.randrange(10, vocabulary) for _ in range(work.tokens_in)] for _ in range(2)]
    prompts = [[rng.randrange(10, vocabulary) for _ in range(work.tokens_in)] for _ in range(work.requests)]
    run(llm.llm_engine, work, "warm", warm, min(8, work.tokens_out))
    row = run(llm.llm_engine, work, variant, prompts, work.tokens_out)
    del llm
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return row


def run(engine: LLMEngine, work: Work, variant: str, prompts: list[list[int]], tokens_out: int) -> Row:
    """Run all requests from their arrival to the last token."""
    params = SamplingParams(temperature=0, max_tokens=tokens_out, ignore_eos=True, detokenize=False)
    compression = Stopwatch(engine)
    scheduler, preempted = engine.scheduler, engine.scheduler.num_preemptions
    for index, ids in enumerate(prompts):
        engine.add_request(f"{variant}-{index}", {"prompt_token_ids": ids}, params, final_only=True)
    done = tokens = concurrent = decode_tokens = 0
    decode_seconds = 0.0
    began = time.perf_counter()
    while engine.has_unfinished_requests():
        before, start = tokens, time.perf_counter()
        for output in engine.step():
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error}")
            done += len(output.outputs[0].token_ids)
        end = time.perf_counter()
        drawn = [len(request.output_token_ids) for request in scheduler.running]
        waiting = sum(len(request.output_token_ids) for request in scheduler.waiting)  # of preempted ones
        tokens = done + sum(drawn) + waiting
        concurrent = max(concurrent, sum(1 for count in drawn if count))
        if all(drawn):
            decode_seconds += end - start
            decode_tokens += tokens - before
    seconds = time.perf_counter() - began
    compression.stop()
    if tokens != len(prompts) * tokens_out:
        raise RuntimeError(f"{tokens} tokens were drawn, not {len(prompts) * tokens_out}")
    return Row(
        work.name,
        variant,
        seconds,
        tokens,
        decode_seconds,
        decode_tokens,
        concurrent,
        compression.seconds,
        compression.count,
        scheduler.num_preemptions - preempted,
    )


class Stopwatch:
    """Times an engine's compressions, with the work that they have queued on the device."""

    def __init__(self, engine: LLMEngine) -> None:
        self.seconds, self._compression = 0.0, engine.extension(KVCompression)
        if self._compression is not None:
            self._run, self._before = self._compression.run, self._compression.engine.num_compressions
            self._compression.run = self._timed  # type: ignore[method-assign]

    @property
    def count(self) -> int:
        """Return the number of compressions, over all requests."""
        return 0 if self._compression is None else self._compression.engine.num_compressions - self._before

    def stop(self) -> None:
        if self._compression is not None:
            self._compression.run = self._run  # type: ignore[method-assign]

    def _timed(self) -> None:
        # The step in flight has been read before, so there is nothing to wait for.
        start = time.perf_counter()
        self._run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start


HEADER = ("variant", "tok/s", "ratio", "decode tok/s", "ratio", "concurrent", "compressing", "preemptions", "seconds")


def cells(row: Row, base: Row | None) -> tuple[str, ...]:
    ratio = "" if base is None else f"{row.rate / base.rate:.2f}x"
    decode_ratio = "" if base is None else f"{row.decode_rate / base.decode_rate:.2f}x"
    share = f"{row.compressing / row.seconds:.1%} ({row.compressions})"
    figures = (f"{row.rate:,.0f}", ratio, f"{row.decode_rate:,.0f}", decode_ratio, str(row.concurrent), share)
    return (row.variant, *figures, str(row.preemptions), f"{row.seconds:.1f}, decoding {row.decode_seconds:.1f}")


def line(row: Row, base: Row | None) -> str:
    return "; ".join(f"{name} {cell}" for name, cell in zip(HEADER, cells(row, base), strict=True) if cell)


def markdown(work: Work, rows: dict[str, Row], metric: str) -> str:
    where = "CPU" if work.options["device"] == "cpu" else torch.cuda.get_device_name()
    when = {name: work.compression.get(name, "default") for name in ("kvc_interval", "new_token_limit")}
    told = ", ".join(f"{name} {value}" for name, value in when.items())
    head = f"{date.today()}, {where}, torch {torch.__version__}, {work.name}, {metric}, {told}"
    table = [head, "", f"| {' | '.join(HEADER)} |", "|" + "---|" * len(HEADER)]
    table += [f"| {' | '.join(cells(rows[v], rows.get('uncompressed')))} |" for v in VARIANTS if v in rows]
    return "\n".join(table)


if __name__ == "__main__":
    main()
