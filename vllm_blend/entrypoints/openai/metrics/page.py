"""docs/metrics.md, made from the code: python -m vllm_blend.entrypoints.openai.metrics.page > docs/metrics.md"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm_blend.engine.metrics import FOUND_IN
from vllm_blend.entrypoints.openai.metrics.meanings import FAILURES, REFUSALS
from vllm_blend.entrypoints.openai.metrics.names import ENGINE_METRICS
from vllm_blend.entrypoints.openai.metrics.recorder import FINISH_REASONS, TENANT_KINDS, TENANT_RESULTS, Recorder
from vllm_blend.entrypoints.openai.metrics.server_metrics import CACHE_CONFIG_HELP, ENGINE_UP_HELP
from vllm_blend.kv_store.tiers import DISK, MEMORY, REMOTE

_INTRODUCTION = """# Metrics

A server answers `GET /metrics` with its metrics in Prometheus's text format. Names that begin with `vllm:` are vLLM's
and mean the same as there, so dashboards for vLLM go on working. This project's own names begin with `vllm_blend:`.
`promtool check metrics` reports only that names should have no colons. The metrics of the process (`process_*`,
`python_*`) come from Prometheus's client. [grafana.json](grafana.json) is a dashboard that Grafana can import.

    scrape_configs:
      - job_name: vllm-blend
        static_configs:
          - targets: ["127.0.0.1:8000"]

While the engine is down (`vllm_blend:engine_up` is 0), its metrics are missing. When it is started again, its totals
begin at zero. A feature's metrics appear only if the feature is on, and the controller's once it has measured
something.

This page is made from the code by `python -m vllm_blend.entrypoints.openai.metrics.page > docs/metrics.md`.
"""


def _listed(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


LABELS = {
    "model_name": "the model's first name (`--served-model-name`); every metric has it",
    "tier": _listed((MEMORY, DISK, REMOTE)),
    "source": _listed(FOUND_IN),
    "operation": _listed(("read", "write")),
    "finished_reason": _listed(FINISH_REASONS),
    "reason": _listed(FAILURES),
    "tenant": "the names of tenants; only with `--tenant-metrics`",
    "result": _listed(TENANT_RESULTS),
    "kind": _listed(TENANT_KINDS),
    "status": f"{_listed(map(str, REFUSALS))}, of HTTP",
}


def metrics_page() -> str:
    """Return the page: a table of the server's metrics, one of the engine's, and one of labels."""
    head = "| name | type | labels | what it is |\n|---|---|---|---|\n"
    server, engine = ("".join(f"| {' | '.join(row)} |\n" for row in rows) for rows in (_server(), _engine()))
    labels = "".join(f"| `{name}` | {text} |\n" for name, text in LABELS.items())
    return "\n".join(
        [
            _INTRODUCTION,
            f"## Requests, as callers see them\n\n{head}{server}",
            f"## The engine\n\n{head}{engine}",
            f"## Labels\n\n| label | values |\n|---|---|\n{labels}",
        ]
    )


def _server() -> Iterator[tuple[str, str, str, str]]:
    yield "`vllm_blend:engine_up`", "gauge", "", ENGINE_UP_HELP
    yield "`vllm:cache_config_info`", "gauge", "the settings", CACHE_CONFIG_HELP
    recorder = Recorder("", shows_tenants=True)
    recorder.tenant("")
    for family in recorder.collect():
        labels = dict.fromkeys(label for sample in family.samples for label in sample.labels)
        shown = _listed(label for label in labels if label not in ("model_name", "le"))
        name = f"{family.name}_total" if family.type == "counter" else family.name
        yield f"`{name}`", family.type, shown, family.documentation


def _engine() -> Iterator[tuple[str, str, str, str]]:
    for name, metric in ENGINE_METRICS.items():
        suffix, kind = ("_total", "counter") if metric.is_total else ("", "gauge")
        yield f"`{name}{suffix}`", kind, _listed(metric.labels), metric.help


if __name__ == "__main__":
    print(metrics_page(), end="")
