"""docs/metrics.md, and the names of metrics, as `promtool check metrics` would judge them."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from tests.checkout import ROOT
from tests.engine.engines import new_llm, tiny_model
from tests.entrypoints.openai.metrics.sources import Source, blending_llm
from tests.entrypoints.openai.metrics.test_server_metrics import dashboard_expressions
from vllm_blend.engine.metrics import Gauge, Metric
from vllm_blend.entrypoints.openai.metrics import ServerMetrics
from vllm_blend.entrypoints.openai.metrics.page import LABELS, metrics_page

# Units of which Prometheus wants the base, and abbreviations of units.
_OTHER_UNITS = {"milliseconds", "microseconds", "minutes", "hours", "days", "bits", "kilobytes", "megabytes", "percent"}
_SHORT_UNITS = {"s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "gib", "mib", "kib", "m", "h", "d"}
_TYPES = {"counter", "gauge", "histogram", "summary"}


def rows() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Return the page's type, labels and help of each metric."""
    cells = [re.split(r" *\| *", line)[1:-1] for line in metrics_page().splitlines() if line.startswith("| `vllm")]
    return {name.strip("`"): (kind, tuple(re.findall(r"\w+", labels)), text) for name, kind, labels, text in cells}


def families(folder: Path) -> dict[str, Family]:
    """Return what servers tell whose engines have all features between them, by name."""
    stored = blending_llm(folder, blend_controller=True)
    events = {"enable_kv_cache_events": True, "endpoint": "tcp://127.0.0.1:*"}
    compressing = new_llm(tiny_model("llama"), enable_kvc=True, kv_events_config=events)
    offloading = new_llm(tiny_model("llama"), enable_blending=True, offload_mode="exact", block_size=16)
    # known when something has been measured, or with a server of chunks
    measured = [Gauge(f"vllm_blend:controller_{name}", 1.5) for name in ("ratio", "prefill_tokens_per_second")]
    measured += [Gauge("vllm_blend:controller_disk_bytes_per_second", 2.5)]
    measured += [Gauge("vllm_blend:chunk_store_remote_hits", 3)]
    measured += [Gauge("vllm_blend:tenant_chunk_bytes_memory_alice", 4)]
    told: dict[str, Metric] = {metric.name: metric for metric in measured}
    for llm in (offloading, compressing, stored):
        told |= {metric.name: metric for metric in llm.get_metrics()}
    metrics = ServerMetrics(Source([*told.values()]), "m", shows_tenants=True)
    metrics.recorder.tenant("alice")
    text = asyncio.run(metrics.text()).decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    return {f"{name}_total" if each.type == "counter" else name: each for name, each in found.items() if "vllm" in name}


def test_the_page_is_that_of_the_code() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_page(), (
        "run python -m vllm_blend.entrypoints.openai.metrics.page > docs/metrics.md"
    )
    asked = set(re.findall(r"\bvllm(?:_blend)?:\w+", dashboard_expressions()))
    names = {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in asked}
    assert len(asked) > 25 and names - rows().keys() == set()
    assert {label for _, labels, _ in rows().values() for label in labels} - LABELS.keys() == {"the", "settings"}


def test_the_page_has_all_that_engines_tell(tmp_path: Path) -> None:
    found, page = families(tmp_path), rows()
    assert found.keys() == page.keys()
    for name, family in found.items():
        kind, labels, text = page[name]
        assert (family.type, family.documentation) == (kind, text), name
        given = {label for sample in family.samples for label in sample.labels} - {"model_name", "le"}
        assert given == set(labels) or labels == ("the", "settings"), name
    assert {sample.labels["tier"] for sample in found["vllm_blend:chunk_store_load_seconds_total"].samples} == {
        "memory",
        "disk",
    }


def test_names_follow_the_rules_of_prometheus() -> None:
    for name, (kind, labels, text) in rows().items():
        assert re.fullmatch(r"vllm(_blend)?:[a-z][a-z0-9_]*[a-z0-9]", name), name
        words = name.partition(":")[2].split("_")
        assert (kind == "counter") == (words[-1] == "total"), name
        assert kind == "histogram" or words[-1] not in ("count", "sum", "bucket"), name
        assert not {*words} & (_OTHER_UNITS | _SHORT_UNITS | _TYPES), name
        assert re.fullmatch(r"[A-Z].*\.", text) and "|" not in text, name
        assert all(re.fullmatch(r"[a-z_]+", label) and label not in ("le", "quantile") for label in labels), name
