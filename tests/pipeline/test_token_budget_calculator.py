"""Byte counts of known models, and the fit of chunks at its exact edges."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.models.gguf_files import gguf_model, write_gguf
from vllm_blend.pipeline import token_budget_calculator as calculator
from vllm_blend.pipeline.token_budget_calculator import ModelFootprint, parse_bytes, read_footprint, token_budget

DEMO_MODEL = Path(__file__).parents[2] / "inputs/demo-model"
SMALL = ModelFootprint(
    num_layers=2, num_kv_heads=3, head_dim=5, dtype="float16", num_parameters=100, max_positions=None
)


def test_the_demo_model() -> None:
    footprint = read_footprint(str(DEMO_MODEL))
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL)
    assert footprint.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert (footprint.dtype, footprint.max_positions) == ("bfloat16", 1024)
    cache = model(torch.arange(7)[None], use_cache=True).past_key_values
    stored = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    assert 7 * footprint.bytes_per_token == stored
    assert read_footprint(str(DEMO_MODEL), "float32").bytes_per_token == 2 * footprint.bytes_per_token


def test_a_7b_shape_from_its_configuration_alone(tmp_path: Path) -> None:
    """Mistral-7B: 7.24e9 parameters, and 128 KiB of KV a token, as published."""
    LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=32768,
        dtype="bfloat16",
    ).save_pretrained(tmp_path)
    footprint = read_footprint(str(tmp_path))
    assert footprint.bytes_per_token == 128 * 1024
    assert footprint.num_parameters == 7_241_732_096


def test_a_gguf_file(tmp_path: Path) -> None:
    model = gguf_model("qwen2")
    footprint = read_footprint(write_gguf(tmp_path / "model.gguf", "qwen2", model))
    assert footprint.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (footprint.num_kv_heads, footprint.max_positions) == (2, model.config.max_position_embeddings)


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no readable config\.json"):
        read_footprint(str(tmp_path))


@given(
    gpu=st.integers(200, 100_000),
    cpu=st.integers(0, 100_000),
    chunk=st.integers(1, 70),
    reserve=st.integers(0, 3),
    block=st.sampled_from([1, 16]),
    percent=st.integers(1, 100),
)
def test_as_many_chunks_as_fit_and_not_one_more(
    gpu: int, cpu: int, chunk: int, reserve: int, block: int, percent: int
) -> None:
    share = Fraction(percent, 100)
    pages = -(-chunk // block) * block * SMALL.bytes_per_token
    fixed = SMALL.weight_bytes + -(-reserve // block) * block * SMALL.bytes_per_token
    if int(gpu * share) < fixed:
        with pytest.raises(ValueError, match="give more memory"):
            token_budget(SMALL, gpu, cpu, chunk, reserve, block, share)
        return
    budget = token_budget(SMALL, gpu, cpu, chunk, reserve, block, share)
    assert fixed + budget.gpu_chunks * pages <= gpu * share < fixed + (budget.gpu_chunks + 1) * pages
    assert budget.cpu_chunks * chunk * 120 <= cpu < (budget.cpu_chunks + 1) * chunk * 120
    assert budget.gpu_context_tokens == budget.gpu_chunks * chunk + reserve
    assert budget.total_context_tokens == (budget.gpu_chunks + budget.cpu_chunks) * chunk + reserve


def test_the_context_ends_where_the_model_does() -> None:
    short = ModelFootprint(2, 3, 5, "float16", 100, max_positions=64)
    budget = token_budget(short, 100_000, 0, 32)
    assert budget.gpu_chunks * 32 > 64 and budget.gpu_context_tokens == budget.total_context_tokens == 64


def test_a_decimal_share_is_taken_at_its_word() -> None:
    """0.7 as a binary float is below 7/10; ten bytes at 0.7 are seven all the same."""
    tiny = ModelFootprint(1, 1, 1, "float16", 1, None)
    assert token_budget(tiny, 10, 0, 1, block_size=1, gpu_memory_utilization=0.7).gpu_kv_bytes == 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_memory": 0}, "gpu_memory must be positive, not 0"),
        ({"cpu_memory": -1}, "cpu_memory must not be negative"),
        ({"chunk_tokens": 0}, "chunk_tokens must be positive"),
        ({"reserve_tokens": -1}, "reserve_tokens must not be negative"),
        ({"block_size": 0}, "block_size must be positive"),
        ({"gpu_memory_utilization": 1.1}, "gpu_memory_utilization must be above 0 and at most 1, not 1.1"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization must be above 0"),
        ({"gpu_memory": 199}, "the weights take 200"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, float], message: str) -> None:
    arguments: dict[str, Any] = {"gpu_memory": 1000, "cpu_memory": 0, "chunk_tokens": 1, **changes}
    with pytest.raises(ValueError, match=message):
        token_budget(SMALL, **arguments)


def test_a_footprint_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="num_layers must be positive, not 0"):
        ModelFootprint(0, 1, 1, "float16", 1, None)
    with pytest.raises(ValueError, match="dtype must be one of float32, bfloat16, float16, not 'int4'"):
        ModelFootprint(1, 1, 1, "int4", 1, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 * 1024**3),
        ("24GB", 24 * 1000**3),
        ("1.5 KiB", 1536),
        ("1000", 1000),
        ("7B", 7),
        ("0.1KB", 100),
        ("2TB", 2 * 10**12),
    ],
)
def test_memory_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 gigabyte", "1e9", "4iB"])
def test_memory_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="24GiB"):
        parse_bytes(text)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "budget.json"
    memory = ["--gpu-memory", "64MiB", "--gpu-memory-utilization", "1", "--cpu-memory", "6MiB"]
    calculator.main(["--model", str(DEMO_MODEL), *memory, "--chunk-tokens", "100", "--output", str(output)])
    budget = json.loads(output.read_text())
    assert budget["gpu_chunks"] == (64 * 1024**2 - budget["weight_bytes"]) // (112 * 6144)
    assert budget["cpu_chunks"] == 6 * 1024**2 // (100 * 6144)
    assert f"{budget['gpu_chunks']} chunks" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags", [["--gpu-memory", "1MiB"], ["--chunk-tokens", "0"], ["--gpu-memory-utilization", "x"]]
)
def test_the_command_explains_what_is_wrong(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        calculator.main(["--model", str(DEMO_MODEL), *flags])
    assert stop.value.code == 1
    assert "error: " in capsys.readouterr().err
