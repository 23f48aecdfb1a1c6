"""What is compared: rows (one kind of work each) in groups that share an engine, for a GPU and for a CPU.

A row's `work` says what prompts there are and how long the answers, and is the same for every side. `ours` is what our
prompts say beside that (which rule blends, and how much it computes again). A row with a `baseline` is work that
another engine can only do as that row does it: it is compared with the other engine's times of its baseline.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

CACHED = ", prefix cache on"  # of the baseline: a blend does not need it
UNITS = {"ms": 1e3, "ms a step": 1e3, "tok/s": None, "req/s": None}  # factor of seconds; None: the unit is a rate


@dataclass(frozen=True)
class Row:
    """One row of the table. A sample is the seconds that one unit of work took: a call, a step, a token, a request."""

    name: str
    label: str
    group: str
    kind: str  # prefill, decode, batch, rag or gap: a class of benchmarks/side/worker.py
    unit: str
    work: dict[str, Any]
    ours: dict[str, Any] | None = None
    baseline: str | None = None
    absent: dict[str, str] = field(default_factory=dict)  # side -> why it has no such row
    kept: float = 1.0  # share of the KV that our engine keeps while decoding: for the floor


@dataclass(frozen=True)
class Group:
    """Rows that share an engine, which every turn starts anew."""

    name: str
    model: str  # a shape of benchmarks.shapes, or a model directory or GGUF file, absolute or relative to the checkout
    options: dict[str, Any]  # of every side's LLM
    ours: dict[str, Any] = field(default_factory=dict)  # of our LLM beside these
    sides: tuple[str, ...] = ()  # that can read the model; empty: all


@dataclass(frozen=True)
class Profile:
    """All rows for one kind of machine."""

    groups: tuple[Group, ...]
    rows: tuple[Row, ...]

    def named(self, names: list[str] | None) -> tuple[Row, ...]:
        """Return the rows of these names, with the baselines that they need; all without names. Raises ValueError."""
        if names is None:
            return self.rows
        known = {row.name: row for row in self.rows}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"--rows {' '.join(unknown)}: there are {', '.join(known)}")
        wanted = {*names, *(base for name in names if (base := known[name].baseline))}
        return tuple(row for row in self.rows if row.name in wanted)


def blends(row: Row, rules: dict[str, dict[str, Any]], baseline: str) -> list[Row]:
    """Return a row for each of our rules, all with the work of `row`."""
    return [
        Row(
            f"{row.name}_{name}",
            f"{row.label.removesuffix(CACHED)}; ours: {said['label']}",
            row.group,
            row.kind,
            row.unit,
            row.work,
            said["prompt"],
            baseline,
            row.absent,
        )
        for name, said in rules.items()
    ]


def rule(label: str, selector: str, ratio: float = 0.0) -> dict[str, Any]:
    """Return what a prompt says to be blended by a rule."""
    prompt: dict[str, Any] = {"blend_selector": selector}
    if ratio:
        prompt["blend_recompute_ratio"] = ratio
    return {"label": label, "prompt": prompt}


RULES = {
    "reuse": rule("plain reuse", "none"),
    "question_8": rule("question attention, 8%", "question_attention", 0.08),
    "question_15": rule("question attention, 15%", "question_attention", 0.15),
    "unshifted_15": rule("question attention without mean shift, 15%", "question_attention(mean_shift=0)", 0.15),
}
NO_BATCHING = {"transformers": "it has no batching of requests that differ in length"}
NO_PREFIX_CACHE = {"transformers": "its generate has no cache of prefixes"}
ONE_RAG = {"prefix": 32, "passage": 512, "passages": 8, "question": 32, "pool": 64, "requests": 1, "tokens_out": 1}
MANY_RAG = ONE_RAG | {"requests": 128, "tokens_out": 32, "running": 64}
# A prompt of 31,808 tokens comes while 32 others decode; the next comes 24 steps after its first token.
GAP = ONE_RAG | {"passages": 62, "requests": 4, "batch": 32, "context": 512, "running_tokens": 2048, "between": 24}
LONG = {"requests": 128, "tokens_in": [6000, 6000], "tokens_out": [256, 256]}
GAP_OPTIONS = {"max_model_len": 32768, "max_num_batched_tokens": 1024, "max_num_seqs": 64}
LONG_OPTIONS = {"max_model_len": 6272, "max_num_batched_tokens": 8192, "max_num_seqs": 128, "block_size": 16}
COMMON_GPU = {"gpu_memory_utilization": 0.85, "load_format": "dummy", "enable_prefix_caching": True}
POOL_BLOCKS = 24 * 2**30 // (128 * 2**10 * 16)  # 24 GiB in blocks of 16 tokens, 128 KiB of K and V a token


def prefill(group: str, tokens: int) -> Row:
    return Row(f"prefill_{tokens}", f"full prefill, {tokens}", group, "prefill", "ms", {"tokens": tokens})


def decode(group: str, batch: int, context: int, steps: int = 64, suffix: str = "", label: str = "") -> Row:
    work = {"batch": batch, "context": context, "steps": steps}
    name = f"decode_b{batch}_{context}{suffix}"
    return Row(name, f"decode step, batch {batch} at {context}{label}", group, "decode", "ms a step", work)


def gpu() -> Profile:
    """Return the rows for a GPU: a 7B model's shape and Qwen3-0.6B's, bf16, random weights."""
    dense = {"max_model_len": 32768, "max_num_batched_tokens": 32768, "max_num_seqs": 128}
    fp8 = {"kv_cache_dtype": "fp8", "max_model_len": 8192, "max_num_batched_tokens": 8192, "max_num_seqs": 128}
    rag = {"max_model_len": 8192, "max_num_batched_tokens": 8192, "max_num_seqs": 64}
    small = {"max_model_len": 4096, "max_num_seqs": 256}
    uncached = {"enable_prefix_caching": False}
    blending = {"enable_blending": True, "blend_chunk_cache_gib": 12}
    kvc = {"enable_kvc": True, "target_compression_rate": 1 / 8}
    groups = (
        Group("7b", "mistral-7b", COMMON_GPU | dense),
        Group("7b-fp8-kv", "mistral-7b", COMMON_GPU | fp8),
        Group("0.6b", "qwen3-0.6b", COMMON_GPU | small | uncached),
        Group("rag-uncached", "mistral-7b", COMMON_GPU | rag | uncached),
        Group("rag", "mistral-7b", COMMON_GPU | rag, blending),
        Group("gap", "mistral-7b", COMMON_GPU | GAP_OPTIONS, blending),
        Group("gap-512", "mistral-7b", COMMON_GPU | GAP_OPTIONS | {"max_num_batched_tokens": 512}, blending),
        Group("long", "mistral-7b", COMMON_GPU | uncached | LONG_OPTIONS | {"num_gpu_blocks_override": POOL_BLOCKS}),
        Group("long-kvc", "mistral-7b", COMMON_GPU | uncached | LONG_OPTIONS, kvc | compressed_pool()),
    )
    one = Row("rag_one", f"one RAG prompt{CACHED}", "rag", "rag", "ms", ONE_RAG)
    many = Row("rag_many", "128 RAG prompts at once, 32 tokens out", "rag", "rag", "req/s", MANY_RAG)
    between = "99th percentile between two tokens of 32 requests while prompts of 31,808 arrive"
    gap = Row("gap", between, "gap", "gap", "ms", GAP)
    gap_512 = Row("gap_512", f"{between}, steps of 512 tokens", "gap-512", "gap", "ms", GAP)
    long = Row("long", "128 requests of 6000 in, 256 out, on 24 GiB of KV", "long", "batch", "tok/s", LONG)
    mix = {"requests": 256, "tokens_in": [100, 1024], "tokens_out": [100, 1024], "temperature": 0.6}
    cold = MANY_RAG | {"cold": True}
    rows = [
        *(prefill("7b", tokens) for tokens in (4096, 8192, 32000)),
        *(decode("7b", batch, context) for batch, context in ((1, 4096), (32, 4096), (128, 2048))),
        *(
            decode("7b-fp8-kv", batch, context, suffix="_fp8_kv", label=", FP8 KV")
            for batch, context in ((1, 4096), (32, 4096), (128, 2048))
        ),
        Row("mix", "0.6B shape, 256 requests of 100-1024 in and out", "0.6b", "batch", "tok/s", mix),
        Row("rag_full", "one RAG prompt, no prefix cache", "rag-uncached", "rag", "ms", ONE_RAG),
        one,
        *blends(one, RULES, "rag_one"),
        many,
        *blends(many, RULES, "rag_many"),
        *blends(
            Row("rag_many_cold", f"{many.label}, passages never seen", "rag", "rag", "req/s", cold),
            {"question_8": RULES["question_8"]},
            "rag_many",
        ),
        gap,
        *blends(gap, {name: RULES[name] for name in ("question_15", "unshifted_15")}, "gap"),
        gap_512,
        *blends(gap_512, {"question_15": RULES["question_15"]}, "gap_512"),
        long,
        Row(
            "long_kvc_8x",
            f"{long.label}; ours: KV-Compress 8x",
            "long-kvc",
            "batch",
            "tok/s",
            LONG,
            None,
            "long",
            {},
            1 / 8,
        ),
    ]
    return Profile(groups, tuple(rows))


def compressed_pool() -> dict[str, Any]:
    """Return our pool of 24 GiB if every key also has a metric and a position of 4 bytes each beside its 512 bytes."""
    return {"num_gpu_blocks_override": POOL_BLOCKS * 512 // 520}


def cpu() -> Profile:
    """Return tiny rows of the demo model: whether everything works, and our engine beside transformers."""
    options = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "enable_prefix_caching": True}
    groups = (
        Group("demo", "inputs/demo-model", options),
        Group("demo-uncached", "inputs/demo-model", options | {"enable_prefix_caching": False}),
        Group("demo-rag", "inputs/demo-model", options, {"enable_blending": True}),
        Group("demo-gap", "inputs/demo-model", options | {"max_num_batched_tokens": 64}, {"enable_blending": True}),
    )
    rag = {"prefix": 16, "passage": 64, "passages": 8, "question": 16, "pool": 16, "requests": 1, "tokens_out": 1}
    one = Row("rag_one", f"one RAG prompt{CACHED}", "demo-rag", "rag", "ms", rag, None, None, NO_PREFIX_CACHE)
    many_work = rag | {"requests": 8, "tokens_out": 8, "running": 16}
    many = Row(
        "rag_many",
        "8 RAG prompts at once, 8 tokens out",
        "demo-rag",
        "rag",
        "req/s",
        many_work,
        None,
        None,
        NO_BATCHING,
    )
    gap_work = rag | {"requests": 2, "batch": 4, "context": 64, "running_tokens": 256, "between": 6}
    between = "99th percentile between two tokens of 4 requests while prompts of 544 arrive"
    gap = Row("gap", between, "demo-gap", "gap", "ms", gap_work, None, None, NO_BATCHING)
    mix = {"requests": 8, "tokens_in": [20, 100], "tokens_out": [8, 32], "temperature": 0.6}
    rows = [
        prefill("demo", 256),
        prefill("demo", 896),
        decode("demo", 1, 512, steps=32),
        decode("demo", 8, 128, steps=32),
        Row("mix", "8 requests of 20-100 in, 8-32 out", "demo", "batch", "tok/s", mix, None, None, NO_BATCHING),
        Row("rag_full", "one RAG prompt, no prefix cache", "demo-uncached", "rag", "ms", rag),
        one,
        *blends(one, RULES, "rag_full"),
        many,
        *blends(many, {name: RULES[name] for name in ("reuse", "question_8")}, "rag_many"),
        gap,
        *blends(gap, {"question_15": RULES["question_15"]}, "gap"),
    ]
    return Profile(groups, tuple(rows))


def real(gguf: str | None, directory: str | None) -> Profile:
    """Return the rows of a real model on a CPU: as a GGUF file beside llama.cpp, and as a directory beside vLLM's CPU
    build and transformers. None leaves one of the two out."""
    options = {
        "max_model_len": 4224,
        "max_num_seqs": 16,
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.3,  # of a CPU's memory, to vLLM
    }
    rag = {"prefix": 21, "passage": 253, "passages": 8, "question": 20, "pool": 8, "requests": 1, "tokens_out": 1}
    batch = {"requests": 16, "tokens_in": [1000, 1000], "tokens_out": [64, 64]}
    groups: list[Group] = []
    rows: list[Row] = []
    for kind, model, sides in (
        ("file", gguf, ("ours", "llama.cpp")),
        ("directory", directory, ("ours", "vllm", "transformers")),
    ):
        if model is None:
            continue
        blended, label = f"{kind}-rag", f"{kind}: "
        groups += [
            Group(kind, model, options, {}, sides),
            Group(blended, model, options, {"enable_blending": True}, sides),
        ]
        one = Row(f"{kind}_rag", f"{label}one RAG prompt of 8 passages{CACHED}", blended, "rag", "ms", rag)
        own = [
            *(prefill(kind, tokens) for tokens in (512, 2048, 4096)),
            *(decode(kind, batch, context, steps=32) for batch, context in ((1, 512), (1, 2048), (8, 512))),
            Row("many", "16 requests of 1000 in, 64 out", kind, "batch", "tok/s", batch),
        ]
        rows += [replace(row, name=f"{kind}_{row.name}", label=f"{label}{row.label}") for row in own]
        rows += [replace(one, absent=NO_PREFIX_CACHE)]
        rows += blends(one, {name: RULES[name] for name in ("reuse", "question_15")}, one.name)
    return Profile(tuple(groups), tuple(rows))


PROFILES = {"gpu": gpu, "cpu": cpu}
