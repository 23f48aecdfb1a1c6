"""Measure the time per output token with most chunks off the device, against all on it.

    OMP_NUM_THREADS=1 python -m benchmarks.offload --mode resident
    python -m benchmarks.offload --device cuda --shape mistral-7b --mode resident --tokens 100

On a CPU, two pools stand for GPU and CPU. Both engines answer the same prompts in this process, in turns, so that other
work on the machine affects both alike. Prompts are random token ids; the model has random weights of the given shape.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from benchmarks.shapes import MISTRAL_7B, QWEN3_06B
from vllm_blend import LLM, SamplingParams
from vllm_blend.features.offload.extension import ChunkOffload
from vllm_blend.features.offload.residency import OFFLOAD

VOCABULARY = 2048
SHAPES = {"mistral-7b": MISTRAL_7B, "qwen3-0.6b": QWEN3_06B}


def make_model(directory: Path, shape: str, layers: int, hidden: int, max_len: int) -> None:
    """Write the config.json of a model whose weights the engine draws, and the demo model's tokenizer."""
    demo = Path(__file__).parents[1] / "inputs" / "demo-model"
    PreTrainedTokenizerFast.from_pretrained(demo).save_pretrained(directory)
    if shape in SHAPES:
        (directory / "config.json").write_text(json.dumps(SHAPES[shape]))
        return
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        max_position_embeddings=max_len,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)


def decode_seconds(llm: LLM, prompts: list[Any], tokens: int) -> list[float]:
    """Return the seconds of each decode step of a batch, once the chunks that have to leave have left."""
    engine = llm.llm_engine
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params)
    times = []
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        outputs = engine.step()
        seconds = time.perf_counter() - start
        if len(outputs) == len(prompts) and len(outputs[0].outputs[0].token_ids) > 4 and _settled(llm):
            times.append(seconds)
    if not times:
        raise RuntimeError(f"the chunks did not leave within {tokens} tokens: give more --tokens")
    return times


def _settled(llm: LLM) -> bool:
    """Return whether no more chunks are on the device than are to stay there."""
    engine = llm.llm_engine
    offload = engine.extension(ChunkOffload)
    if offload is None:
        return True
    states = [OFFLOAD.get(request) for request in engine.scheduler.running]
    residencies = [None if state is None else state.residency for state in states]
    target = offload.scheduler.policy.target
    return all(r is not None and sum(c.resident for c in r.movable) <= target(len(r.movable)) for r in residencies)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("resident", "exact"), default="resident")
    parser.add_argument("--predictor", default="query_digest")
    parser.add_argument("--fraction", type=float, default=0.2, help="share of the chunks on the device")
    parser.add_argument("--chunks", type=int, default=20)
    parser.add_argument("--chunk-tokens", type=int, default=200)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shape", choices=("small", *SHAPES), default="small", help="small: --layers of --hidden")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512)
    args = parser.parse_args(argv)
    random = np.random.default_rng(0)

    def ids(count: int) -> list[int]:
        drawn: list[int] = random.integers(3, VOCABULARY, count).tolist()
        return drawn

    prompts = [
        {"prefix": ids(16), "chunks": [ids(args.chunk_tokens) for _ in range(args.chunks)], "suffix": ids(20)}
        for _ in range(args.batch)
    ]
    length = 16 + args.chunks * args.chunk_tokens + 20 + args.tokens
    with TemporaryDirectory() as folder:
        make_model(Path(folder), args.shape, args.layers, args.hidden, length + 64)
        common: dict[str, Any] = {"device": args.device, "load_format": "dummy", "enable_prefix_caching": True}
        common |= {"max_model_len": length + 64, "max_num_seqs": max(4, args.batch)}
        if args.device != "cpu":  # two engines share the GPU
            common |= {"gpu_memory_utilization": 0.4, "num_gpu_blocks_override": 3 * args.batch * length // 16}
        moving = {"offload_mode": args.mode, "offload_device_fraction": args.fraction}
        engines = {
            "all on the device": LLM(folder, **common),
            f"{args.mode}, {args.fraction:.0%}": LLM(folder, **common, **moving, offload_predictor=args.predictor),
        }
        times: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(args.rounds + 1):
            for name, llm in engines.items():
                measured = decode_seconds(llm, prompts, args.tokens)
                times[name] += measured if turn else []  # the first round warms up, and fills the prefix cache
    print(
        f"{torch.cuda.get_device_name() if args.device != 'cpu' else f'{torch.get_num_threads()} threads'}, "
        f"{args.shape if args.shape in SHAPES else f'{args.layers} layers of {args.hidden}'}, batch {args.batch}, "
        f"prompts of {length - args.tokens} tokens in {args.chunks} chunks, {args.predictor}"
    )
    medians = {name: 1000 * statistics.median(values) for name, values in times.items()}
    for name, value in medians.items():
        print(f"  {name:24s} {value:8.2f} ms per token (median of {len(times[name])} steps)")
    whole, part = medians.values()
    scheduler = list(engines.values())[1].llm_engine.extension(ChunkOffload)
    assert scheduler is not None
    moves = scheduler.scheduler
    print(f"  ratio {part / whole:.3f}; {moves.num_promotions} promotions, {moves.num_evictions} evictions, ", end="")
    print(f"{moves.num_bytes / 2**20:.0f} MiB moved")


if __name__ == "__main__":
    main()
