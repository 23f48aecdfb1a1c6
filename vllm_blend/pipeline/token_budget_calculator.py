"""Compute how many chunks of KV cache fit beside a model in GPU memory and in CPU memory, and the context they make.

    python -m vllm_blend.pipeline.token_budget_calculator --model inputs/demo-model --gpu-memory 1GiB --cpu-memory 4GiB

All arithmetic is on whole bytes: a token's KV takes 2 (K and V) x layers x KV heads x head size x bytes of the type.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from vllm_blend.pipeline.files import write_json

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
UNITS = {
    "B": 1,
    **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)},
}


@dataclass(frozen=True)
class ModelFootprint:
    """What decides how much memory a model and its KV take. `max_positions` is None if there is no limit."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    num_parameters: int
    max_positions: int | None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.dtype!r}")
        for name in ("num_layers", "num_kv_heads", "head_dim", "num_parameters"):
            _require_positive(name, getattr(self, name))

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class TokenBudget:
    """The chunks that fit, and the contexts they make. GPU chunks take whole pages of `block_size` tokens."""

    bytes_per_token: int
    weight_bytes: int
    gpu_kv_bytes: int  # what the weights leave of the GPU budget
    gpu_chunk_bytes: int
    cpu_chunk_bytes: int
    gpu_chunks: int
    cpu_chunks: int
    gpu_context_tokens: int  # the GPU's chunks and the reserve, within the model's limit
    total_context_tokens: int  # the same with the CPU's chunks


def read_footprint(model: str, dtype: str = "auto") -> ModelFootprint:
    """Read a model's config (of a directory, a GGUF file or a hub id) and count its parameters without loading them.

    With dtype "auto" the checkpoint's is used. Raises ValueError if there is no such model or its attention has no KV
    heads.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from vllm_blend.models.gguf.names import names_gguf
    from vllm_blend.models.loader import load_hf_config

    try:
        config = load_hf_config(model) if names_gguf(model) else AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model {model!r}: no readable config.json; give a model directory or a hub id ({error})"
        ) from error
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise ValueError(
            f"model {model!r}: config.json has no num_attention_heads; only attention models have a KV cache"
        )
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    stored = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None) or "float32"
    return ModelFootprint(
        num_layers=config.num_hidden_layers,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        dtype=str(stored).removeprefix("torch.") if dtype == "auto" else dtype,
        num_parameters=parameters,
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def token_budget(
    footprint: ModelFootprint,
    gpu_memory: int,
    cpu_memory: int,
    chunk_tokens: int,
    reserve_tokens: int = 0,
    block_size: int = 16,
    gpu_memory_utilization: float | Fraction | str = 1,
) -> TokenBudget:
    """Return the chunks of `chunk_tokens` tokens that fit in both memories (bytes).

    `reserve_tokens` (instruction, question, answer) are kept free on the GPU. Raises ValueError for sizes that make no
    sense, and if the weights and the reserve alone do not fit.
    """
    _require_positive("chunk_tokens", chunk_tokens)
    _require_positive("block_size", block_size)
    _require_positive("gpu_memory", gpu_memory)
    for name, value in (("cpu_memory", cpu_memory), ("reserve_tokens", reserve_tokens)):
        if value < 0:
            raise ValueError(f"{name} must not be negative, not {value}")
    try:
        share = Fraction(str(gpu_memory_utilization))  # exact: 0.7 as a binary float is below 7/10
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share <= 1:
        raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, not {gpu_memory_utilization}")

    def paged(tokens: int) -> int:
        return -(-tokens // block_size) * block_size * footprint.bytes_per_token

    usable = int(gpu_memory * share)
    kv_bytes = usable - footprint.weight_bytes - paged(reserve_tokens)
    if kv_bytes < 0:
        raise ValueError(
            f"gpu_memory leaves {usable} usable bytes, but the weights take {footprint.weight_bytes} and the reserve "
            f"{paged(reserve_tokens)}: give more memory, a smaller dtype or a smaller reserve"
        )
    gpu_chunks = kv_bytes // paged(chunk_tokens)
    cpu_chunks = cpu_memory // (chunk_tokens * footprint.bytes_per_token)

    def context(chunks: int) -> int:
        tokens = chunks * chunk_tokens + reserve_tokens
        return tokens if footprint.max_positions is None else min(tokens, footprint.max_positions)

    return TokenBudget(
        bytes_per_token=footprint.bytes_per_token,
        weight_bytes=footprint.weight_bytes,
        gpu_kv_bytes=kv_bytes,
        gpu_chunk_bytes=paged(chunk_tokens),
        cpu_chunk_bytes=chunk_tokens * footprint.bytes_per_token,
        gpu_chunks=gpu_chunks,
        cpu_chunks=cpu_chunks,
        gpu_context_tokens=context(gpu_chunks),
        total_context_tokens=context(gpu_chunks + cpu_chunks),
    )


def parse_bytes(text: str) -> int:
    """Return the bytes in "24GiB" (powers of 1024), "24GB" (powers of 1000), "1.5 GiB" or "1000", rounded down."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)?\s*", text)
    if not found or (found[2] or "B") not in UNITS:
        raise ValueError(f"memory must be a number with a unit such as 24GiB or 24GB, not {text!r}")
    return int(Fraction(found[1]) * UNITS[found[2] or "B"])


def _require_positive(name: str, value: int) -> None:
    if value <= 0:
        raise ValueError(f"{name} must be positive, not {value}")


def _readable(bytes_: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if bytes_ >= UNITS[unit]:
            return f"{bytes_} bytes ({bytes_ / UNITS[unit]:.2f} {unit})"
    return f"{bytes_} bytes"


def _report(footprint: ModelFootprint, budget: TokenBudget, chunk_tokens: int) -> str:
    limit = "no limit" if footprint.max_positions is None else f"{footprint.max_positions} positions"
    return "\n".join(
        [
            f"model           {footprint.num_parameters} parameters, {footprint.dtype}, {limit}",
            f"weights         {_readable(budget.weight_bytes)}",
            f"KV of a token   {_readable(budget.bytes_per_token)}",
            f"KV of a chunk   {_readable(budget.gpu_chunk_bytes)} on the GPU, {chunk_tokens} tokens",
            f"GPU             {_readable(budget.gpu_kv_bytes)} for KV: {budget.gpu_chunks} chunks",
            f"CPU             {budget.cpu_chunks} chunks",
            f"context         {budget.gpu_context_tokens} tokens from the GPU's chunks, "
            f"{budget.total_context_tokens} with the CPU's",
        ]
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compute how many chunks of KV cache fit, and what context they make.")
    add: Any = parser.add_argument
    add("--model", default="inputs/demo-model", help="model directory or hub id (default: %(default)s)")
    add(
        "--dtype",
        default="auto",
        choices=["auto", *DTYPE_BYTES],
        help="data type of weights and KV (default: %(default)s)",
    )
    add("--gpu-memory", default="24GiB", help="GPU memory, such as 24GiB or 24GB (default: %(default)s)")
    add("--cpu-memory", default="64GiB", help="CPU memory for chunks (default: %(default)s)")
    add("--chunk-tokens", type=int, default=512, help="tokens of a chunk (default: %(default)s)")
    add(
        "--reserve-tokens",
        type=int,
        default=0,
        help="GPU tokens for instruction, question, answer (default: %(default)s)",
    )
    add("--block-size", type=int, default=16, help="tokens of a KV page on the GPU (default: %(default)s)")
    add("--gpu-memory-utilization", default="0.9", help="share of the GPU memory to use (default: %(default)s)")
    add("--output", type=Path, help="also write the numbers to this JSON file")
    args = parser.parse_args(argv)
    try:
        footprint = read_footprint(args.model, args.dtype)
        budget = token_budget(
            footprint,
            parse_bytes(args.gpu_memory),
            parse_bytes(args.cpu_memory),
            args.chunk_tokens,
            args.reserve_tokens,
            args.block_size,
            args.gpu_memory_utilization,
        )
    except ValueError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(_report(footprint, budget, args.chunk_tokens))
    if args.output:
        write_json(args.output, {"model": asdict(footprint), "chunk_tokens": args.chunk_tokens, **asdict(budget)})


if __name__ == "__main__":
    main()
