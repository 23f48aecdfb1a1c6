"""What a device allows at best for a row's work: the larger of its arithmetic and its memory traffic.

Arithmetic over the dense bf16 peak and bytes over the memory's bandwidth, both as the vendor's datasheet gives them, so
a floor lies below what any program reaches. Arithmetic counts the matrix products of the layers, the output layer for
tokens that are drawn, and attention; traffic counts the weights once a step and the K and V that a step must read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.side.rows import Row


@dataclass(frozen=True)
class Device:
    """Figures of a datasheet: dense bf16 operations and bytes, both per second."""

    name: str
    operations: float
    bandwidth: float

    def __str__(self) -> str:
        return f"{self.name}: {self.operations / 1e12:g} TFLOP/s dense bf16, {self.bandwidth / 1e12:g} TB/s"


# What the driver calls a card has to contain the words -> NVIDIA's datasheets (half of the figures with sparsity).
DATASHEETS = (
    (("H200", "NVL"), Device("H200 NVL", 835.5e12, 4.8e12)),
    (("H200",), Device("H200 SXM", 989.5e12, 4.8e12)),
    (("H100", "NVL"), Device("H100 NVL", 835.5e12, 3.9e12)),
    (("H100", "PCIe"), Device("H100 PCIe", 756e12, 2.0e12)),
    (("H100", "HBM3"), Device("H100 SXM", 989.5e12, 3.35e12)),
    (("A100", "SXM4-80GB"), Device("A100 80GB SXM", 312e12, 2.039e12)),
    (("A100", "80GB PCIe"), Device("A100 80GB PCIe", 312e12, 1.935e12)),
    (("L40S",), Device("L40S", 362e12, 0.864e12)),
    (("L4",), Device("L4", 121e12, 0.3e12)),
)


def datasheet(name: str) -> Device | None:
    """Return the datasheet's figures of a card, None for one that is not known."""
    words = name.split()
    for needed, device in DATASHEETS:
        if all(each in name if each not in ("L4", "L40S") else each in words for each in needed):
            return device
    return None


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that floors follow from."""

    layer_weights: float  # parameters of all layers
    head_weights: float  # parameters of the output layer
    attention: float  # operations of one query and one key, over all layers and heads
    kv_bytes: float  # of one token, over all layers
    itemsize: int

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Shape:
        hidden, layers, head = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
        queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        weights = 2 * hidden * queries + 2 * hidden * keys + 3 * hidden * config["intermediate_size"]
        itemsize = {"float32": 4}.get(config["torch_dtype"], 2)
        total = layers * weights
        return cls(total, hidden * config["vocab_size"], 4 * layers * queries, 2 * layers * keys * itemsize, itemsize)

    @property
    def weight_bytes(self) -> float:
        return (self.layer_weights + self.head_weights) * self.itemsize

    def prefill(self, tokens: float, computed: float | None = None) -> float:
        """Return the operations of a prompt's prefill, or of so many of its tokens, wherever they stand."""
        computed = tokens if computed is None else computed
        return 2 * self.layer_weights * computed + 2 * self.head_weights + self.attention * computed * tokens / 2

    def decode(self, context: float) -> float:
        """Return the operations of one token after `context` others."""
        return 2 * (self.layer_weights + self.head_weights) + self.attention * context


def floor(row: Row, config: dict[str, Any], device: Device) -> float:
    """Return the least seconds of one unit of a row's work on our side: a call, a step, a token or a request."""
    shape = Shape.from_config(config)
    operations, traffic, units = COSTS[row.kind](shape, row)
    return max(operations / device.operations, traffic / device.bandwidth) / units


def _prefill(shape: Shape, row: Row) -> tuple[float, float, float]:
    tokens = row.work["tokens"]
    return shape.prefill(tokens), shape.weight_bytes + tokens * shape.kv_bytes, 1


def _decode(shape: Shape, row: Row) -> tuple[float, float, float]:
    batch, context = row.work["batch"], row.work["context"]
    kv_bytes = shape.kv_bytes / (2 if row.name.endswith("_fp8_kv") else 1)
    return batch * shape.decode(context), shape.weight_bytes + batch * context * kv_bytes, 1


def _batch(shape: Shape, row: Row) -> tuple[float, float, float]:
    """The mean lengths stand for the drawn ones, and the longest answer for the steps, which is less than there are."""
    work = row.work
    requests, before, out = work["requests"], sum(work["tokens_in"]) / 2, sum(work["tokens_out"]) / 2
    operations = requests * (shape.prefill(before) + out * shape.decode(before + out / 2))
    traffic = out * shape.weight_bytes + requests * out * (before + out / 2) * shape.kv_bytes * row.kept
    return operations, traffic, requests * out


def _rag(shape: Shape, row: Row) -> tuple[float, float, float]:
    """A blend computes its share of the passages and the question; it reads the stored KV once and writes it once."""
    work, requests, out = row.work, row.work["requests"], row.work["tokens_out"]
    passages = work["passages"] * work["passage"]
    tokens = work["prefix"] + passages + work["question"]
    blended = row.ours is not None
    computed = passages * row.ours.get("blend_recompute_ratio", 0.0) + work["question"] if row.ours else float(tokens)
    placed = 2 * passages * shape.kv_bytes if blended else 0.0
    operations = requests * (shape.prefill(tokens, computed) + (out - 1) * shape.decode(tokens))
    if blended and work.get("cold"):
        operations += 2 * shape.layer_weights * work["pool"] * work["passage"]  # every passage once
    rounds = -(-requests // work.get("running", requests))
    traffic = rounds * out * shape.weight_bytes + requests * (placed + (out - 1) * tokens * shape.kv_bytes)
    return operations, traffic, requests


COSTS = {"prefill": _prefill, "decode": _decode, "batch": _batch, "rag": _rag, "gap": _decode}
