"""Measure the time to first token and decoding on a GPU, blends beside full prefills of as many tokens in the same run.

    bash scripts/build_cuda.sh && python -m benchmarks.engine_gpu [--only prefill blend decode mix] [--chunk-device cpu]
        [--markdown FILE]

Weights are random, in the shapes named below, bf16; times are medians. Chunk KV is on the GPU; `--chunk-device cpu`
measures the same blends with it in pinned host memory, too. TTFT is `first_token_time - first_scheduled_time` of one
request at a time, with placing and selection. `floor` is the limit that an H200's arithmetic or memory sets for the
same work, `peak` the most memory that tensors took, with the caches.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.samples import record
from benchmarks.shapes import MISTRAL_7B, QWEN3_06B
from vllm_blend import LLM, SamplingParams
from vllm_blend.blend.selectors.question_attention import QuestionAttention
from vllm_blend.kv_store.transfer import LayerwiseLoad

TOKENIZER = str(Path(__file__).resolve().parents[1] / "inputs" / "demo-model")
CHUNK = 512
FLOOR_PREFILL = {2048: 39.0, 4096: 80.0, 8192: 172.0, 16384: 387.0, 32000: 923.0}  # ms at 784 TFLOP/s
FLOOR_DECODE = {(1, 4096): 3.4, (32, 4096): 7.4, (128, 2048): 11.5}  # ms a step, by batch and context
READ = 4.2e9  # bytes per ms that an H200 reads
WEIGHTS_7B = 13.96e9  # bytes of the layers
KV_BYTES_7B = 2**17  # of a token in bf16

rows: list[tuple[str, ...]] = []


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["prefill", "blend", "decode", "mix"])
    parser.add_argument("--lengths", nargs="*", type=int, default=[4096, 8192, 32000])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--quantization", help="quantization of the linear layers: fp8")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"], help="of pages and chunks")
    parser.add_argument("--chunk-device", choices=["cuda", "cpu"], default="cuda", help="cpu: also from host memory")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args(argv)
    rng = random.Random(0)
    full: dict[int, float] = {}  # ms of a full prefill, by tokens
    options: dict[str, Any] = {"attention_backend": args.backend, "quantization": args.quantization}
    options["kv_cache_dtype"] = args.kv_cache_dtype
    if "prefill" in args.only or "decode" in args.only:
        llm = load(MISTRAL_7B, enable_prefix_caching=False, max_num_batched_tokens=32768, max_num_seqs=128, **options)
        if "prefill" in args.only:
            check_kv_bytes(llm, MISTRAL_7B)
            for n in args.lengths:
                prompts: list[Any] = [{"prompt_token_ids": ids(rng, n, 32000)} for _ in range(args.repeats + 2)]
                full[n] = ttft(f"full prefill, {n}", llm, prompts)
                report(f"full prefill, {n}", full[n], FLOOR_PREFILL.get(n))
        if "decode" in args.only:
            for (batch, context), floor in FLOOR_DECODE.items():
                if args.kv_cache_dtype == "fp8":  # half of the bytes of K and V are not read
                    floor -= batch * context * KV_BYTES_7B / 2 / READ
                report(f"decode step, batch {batch} at {context}", decode(llm, rng, batch, context), floor)
        unload(llm)
    if "blend" in args.only:
        by_length = {n: chunked(rng, n) for n in args.lengths}
        blending = {"enable_blending": True, "max_num_seqs": 8, **options}
        llm = load(MISTRAL_7B, blend_chunk_cache_gib=24, **blending)
        on_gpu = {}
        for n, name, asked in blends(by_length):
            on_gpu[name] = ttft(name, llm, [asked] * (args.repeats + 3))
            report(name, on_gpu[name], blend_floor(n, asked), full.get(n))
        unload(llm)
        if args.chunk_device == "cpu":
            from_host(by_length, on_gpu, full, args.repeats, blending)
    if "mix" in args.only:
        llm = load(QWEN3_06B, enable_prefix_caching=False, max_num_seqs=256, max_model_len=4096, **options)
        mix(llm)
        unload(llm)
    name, weights = torch.cuda.get_device_name(), args.quantization or "bf16"
    header = f"{date.today()}, {name}, torch {torch.__version__}, CUDA {torch.version.cuda}, {weights}, random weights"
    lines = [
        header,
        "",
        "| work | time | full prefill / this | floor | peak, GiB |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


def load(config: dict[str, Any], **options: Any) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        start = time.perf_counter()
        llm = LLM(folder, tokenizer=TOKENIZER, load_format="dummy", device="cuda", **options)
        print(f"loaded in {time.perf_counter() - start:.1f} s, {llm.llm_engine.blocks.num_blocks} blocks", flush=True)
        return llm


def unload(llm: LLM) -> None:
    del llm.llm_engine
    gc.collect()
    torch.cuda.empty_cache()


def ids(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(10, vocab) for _ in range(count)]


def chunked(rng: random.Random, tokens: int) -> dict[str, Any]:
    """Return a prompt of `tokens` tokens: a prefix of 32, a suffix of 32, chunks of 512 between."""
    left, chunks = tokens - 64, []
    while left > 0:
        chunks.append(ids(rng, min(CHUNK, left), 32000))
        left -= CHUNK
    return {"prefix": ids(rng, 32, 32000), "chunks": chunks, "suffix": ids(rng, 32, 32000)}


def blends(prompts: dict[int, dict[str, Any]]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Return tokens, name and prompt of every blend that is measured."""
    for n, prompt in prompts.items():
        for selector, ratio in (
            ("value_deviation", 0.15),
            ("question_attention", 0.15),
            ("question_attention", 0.08),
            ("first_tokens", 0.15),
            ("first_tokens", 0.08),
        ):
            asked = prompt | {"blend_selector": selector, "blend_recompute_ratio": ratio}
            yield n, f"blend {ratio:.0%} {selector}, {n}", asked


def from_host(
    prompts: dict[int, dict[str, Any]],
    on_gpu: dict[str, float],
    full: dict[int, float],
    repeats: int,
    options: dict[str, Any],
) -> None:
    """Measure the same blends with chunk KV in pinned host memory, against their time with it on the GPU (compute) and
    the time that the host link takes for their chunk KV (load)."""
    rate = link_speed()
    config = MISTRAL_7B
    per_token = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]  # K and V, bf16
    gib = sum(prompts) * per_token / 2**30 + 1
    llm = load(config, blend_chunk_cache_gib=gib, blend_chunk_device="cpu", **options)
    for n, name, asked in blends(prompts):
        load_ms = (n - len(asked["suffix"])) * per_token / rate / 1e6
        measured, compute_ms = ttft(f"{name}, from the host", llm, [asked] * (repeats + 3)), on_gpu[name]
        over = measured / max(load_ms, compute_ms)
        what = f"{name}, from the host (load {load_ms:.1f}, compute {compute_ms:.1f} ms: {over:.2f} x the larger)"
        report(what, measured, max(load_ms, blend_floor(n, asked)), full.get(n))
    for n, prompt in prompts.items():
        speed = load_speed(llm, prompt)
        print(f"chunks of {n} tokens, layer by layer: {speed:.1f} GB/s; one pinned copy: {rate:.1f}", flush=True)
    unload(llm)


def blend_floor(tokens: int, asked: dict[str, Any]) -> float:
    """Return the floor in ms: the chosen share of a full prefill's arithmetic; if the rule looks first, also layer 0
    and the projections of layer 1 of all tokens, or the reading of the weights that the question's pass needs."""
    layers, ratio, rule = MISTRAL_7B["num_hidden_layers"], asked["blend_recompute_ratio"], asked["blend_selector"]
    share = ratio + (1.3 / layers if rule == "value_deviation" else 0)
    looking = QuestionAttention().layer_share * WEIGHTS_7B / READ if rule == "question_attention" else 0
    return float(round(share * FLOOR_PREFILL.get(tokens, 0.0) + looking, 1))


def check_kv_bytes(llm: LLM, config: dict[str, Any]) -> None:
    """Check that a token takes K and V of its layers and heads in the cache's dtype, and nothing more."""
    cache = llm.llm_engine.model_executor.driver_worker.model_runner.cache
    slots = cache.key.shape[1] * cache.key.shape[2]
    expected = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * cache.key.itemsize
    assert cache.key.nbytes + cache.value.nbytes == slots * expected
    print(f"KV of a token: {expected} bytes", flush=True)


def link_speed() -> float:
    """Return the GB/s of one large copy from pinned memory: the fastest of several, as a median was once half of what
    loads beside it reached."""
    host = torch.ones(1 << 29, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(host, device="cuda")
    return host.nbytes / min(seconds(lambda: target.copy_(host, non_blocking=True)) for _ in range(5)) / 1e9


def load_speed(llm: LLM, prompt: dict[str, Any]) -> float:
    """Return the GB/s at which the stored chunks of a prompt arrive while nothing is computed."""
    engine = llm.llm_engine
    worker = engine.model_executor.driver_worker
    ring = worker.model_runner.block_pass.placement.ring
    assert ring is not None
    _, ids = engine.identify_chunks(prompt["prefix"], prompt["chunks"])
    chunks = [chunk for chunk in (engine.chunk_store.get(each.key) for each in ids) if chunk is not None]
    assert len(chunks) == len(ids)

    def load_all() -> None:
        load = LayerwiseLoad(ring, chunks, worker.num_layers)
        for layer in range(worker.num_layers):
            for _ in load.layer(layer):
                pass

    return sum(chunk.nbytes for chunk in chunks) / seconds(load_all) / 1e9


def seconds(work: Callable[[], object], repeats: int = 6) -> float:
    """Return the median time until the device has done `work`."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ttft(name: str, llm: LLM, prompts: list[Any]) -> float:
    """Return the median ms to the first token; the first two prompts warm up (and store the chunks)."""
    times = []
    for prompt in prompts:
        output = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, detokenize=False), use_tqdm=False)[
            0
        ]
        if output.error:
            raise RuntimeError(output.error)
        assert output.metrics is not None and output.metrics.first_token_time and output.metrics.first_scheduled_time
        times.append(output.metrics.first_token_time - output.metrics.first_scheduled_time)
    record(name, times[2:])
    return statistics.median(times[2:]) * 1e3


def begin_decoding(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[str]:
    """Add prompts and step until all of them decode; return the requests' names."""
    engine, names = llm.llm_engine, [f"decode-{i}" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": prompt}, params, final_only=True)
    while engine.scheduler.waiting or any(not r.output_token_ids for r in engine.scheduler.running):
        engine.step()
    return names


def decode(llm: LLM, rng: random.Random, batch: int, context: int, steps: int = 50) -> float:
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=steps + 20, ignore_eos=True, detokenize=False)
    names = begin_decoding(llm, [ids(rng, context, 32000) for _ in range(batch)], params)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()  # ends with reading the tokens: the device is done
        times.append(time.perf_counter() - start)
    engine.abort_request(names)
    record(f"decode step, batch {batch} at {context}", times[5:])
    return statistics.median(times[5:]) * 1e3


def mix(llm: LLM) -> None:
    """Run 256 requests of 100-1024 tokens in and 100-1024 out (nano-vllm's benchmark, seed 0)."""
    random.seed(0)
    prompts: list[Any] = [
        {"prompt_token_ids": [random.randint(0, 10000) for _ in range(random.randint(100, 1024))]} for _ in range(256)
    ]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=random.randint(100, 1024), detokenize=False)
        for _ in range(256)
    ]
    llm.generate([[1, 2, 3]], SamplingParams(detokenize=False), use_tqdm=False)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    lengths = [(len(q["prompt_token_ids"]), p.max_tokens or 0) for q, p in zip(prompts, params, strict=True)]
    drawn = sum(out for _, out in lengths)
    rate = drawn / seconds
    # Every step reads the weights (1.2 GB), and every token the K and V before it.
    kv = 2 * 2 * QWEN3_06B["num_hidden_layers"] * QWEN3_06B["num_key_value_heads"] * QWEN3_06B["head_dim"]
    read = max(out for _, out in lengths) * 1.2e9 + sum(out * (before + out / 2) * kv for before, out in lengths)
    fastest = drawn / (read / READ / 1e3)
    figures = (f"{rate:,.0f} tok/s", "", f"{fastest:,.0f} tok/s", peak())
    rows.append(("Qwen3-0.6B shape, 256-request mix", *figures))
    print(rows[-1], flush=True)


def peak() -> str:
    """Return the most GiB that tensors took since the last call."""
    most = torch.cuda.max_memory_allocated() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return f"{most:.1f}"


def report(name: str, measured: float, floor: float | None, full: float | None = None) -> None:
    """Add a row: milliseconds, and those of the floor and of a full prefill of as many tokens, where known."""
    ratio = f"{full / measured:.2f}x" if full else ""
    rows.append((name, f"{measured:.2f} ms", ratio, f"{floor:.1f} ms" if floor else "", peak()))
    print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
