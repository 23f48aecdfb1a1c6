"""The tables of benchmarks/results are what their JSON files give: a figure that was changed by hand is found."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    bad_bodies,
    cpu_kernels,
    early_steps,
    fp8_cache_quality,
    gpu_timeline,
    int4_gpu,
    ray_autoscaling,
    ray_routing,
    real_text,
    routing_sim,
    step_graphs_gpu,
    stream_cost,
    sums_gpu,
    tensor_parallel,
)
from benchmarks.side import report as side_report
from tests.checkout import ROOT

pytestmark = pytest.mark.cpu_only

RESULTS = ROOT / "benchmarks" / "results"
MEASURED = sorted(RESULTS.glob("synthetic_*.json")) + sorted(RESULTS.glob("real_*.json"))


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def text_of(name: str) -> str:
    return (RESULTS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_measured_answers_give_their_page(path: Path) -> None:
    found = load(path.name)
    assert text_of(f"{path.stem}.md") == real_text.page(found)
    assert found["about"]["command"].endswith(f"--output benchmarks/results/{path.stem}")
    for row in found["rows"]:
        own = found["questions"][row["dataset"]][row["setting"]]
        assert row["questions"] == len(own["text"]) == len(found["questions"][row["dataset"]]["id"])
        for name in ("f1", "exact_match", "agreement", "kl", "first_kl"):
            assert statistics.fmean(own[name]) == pytest.approx(row[name], rel=1e-3, abs=1e-4)


def test_an_fp8_cache_gives_its_page() -> None:
    for name in ("fp8_cache.json", "fp8_cache_long.json"):
        assert fp8_cache_quality.page(load(name)) in text_of("fp8_cache.md")


def test_simulations_and_replicas_give_their_pages() -> None:
    simulated = load("routing_sim.json")
    command = "python -m benchmarks.routing_sim --output results/routing_sim"
    assert text_of("routing_sim.md") == routing_sim.render(simulated, command)
    replicas = load("ray_routing.json")
    assert text_of("ray_routing.md").strip() == ray_routing.render(replicas).strip()
    args = ray_routing.make_parser().parse_args(replicas["command"].split()[3:])
    assert {name: getattr(args, name) for name in replicas["settings"]} == replicas["settings"]


def test_a_run_of_autoscaling_gives_its_page() -> None:
    found = load("ray_autoscaling.json")
    assert ray_autoscaling.is_good(found)
    assert text_of("ray_autoscaling.md").strip() == ray_autoscaling.render(found).strip()
    args = ray_autoscaling.make_parser().parse_args(found["command"].split()[3:])
    assert {name: getattr(args, name) for name in found["settings"]} == found["settings"]


def test_samples_give_the_tables_of_servers() -> None:
    assert bad_bodies.table(load("bad_bodies.json")["samples"]["rows"]) in text_of("bad_bodies.md")
    assert stream_cost.table(load("stream_cost.json")["cpu_ms_per_step"]) in text_of("stream_cost.md")
    page = text_of("serving_load.md")
    for run in load("serving_load.json").values():
        assert "\n".join([run["head"], *run["rows"]]) in page


def test_samples_of_gpus_give_their_tables() -> None:
    ranks = {int(size): samples for size, samples in load("tensor_parallel_h200.json")["samples"].items()}
    assert "\n".join(tensor_parallel.table(ranks)) in text_of("tensor_parallel_h200.md")
    for name in ("side_by_side_h100", "side_by_side_h200", "side_by_side_h200_7b", "side_by_side_h200_ours"):
        assert text_of(f"{name}.md") == side_report.render(load(f"{name}.json"))
    assert "\n".join(sums_gpu.table(load("sums_h200.json")["samples"])) in text_of("tensor_parallel_h200.md")
    graphs = load("step_graphs_h100.json")["samples"]
    assert "\n".join(step_graphs_gpu.table(graphs)) in text_of("step_graphs_h100.md")
    for name in ("gpu_timeline_h100", "gpu_timeline_h200"):
        assert "\n".join(gpu_timeline.table(load(f"{name}.json")["samples"])) in text_of(f"{name}.md")
    assert "\n".join(int4_gpu.table(load("int4_h100.json")["measured"])) in text_of("int4_h100.md")
    early = load("early_steps_h100.json")["samples"]
    assert "\n".join(early_steps.table(early)) in text_of("early_steps_h100.md")


def test_pairs_with_and_without_kernels_give_their_page() -> None:
    assert text_of("cpu_kernels.md") == cpu_kernels.render(load("cpu_kernels.json"))
