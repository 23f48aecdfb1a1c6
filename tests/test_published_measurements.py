"""Sentences about times, sizes and evictions on a CPU, written again from the tables that they summarise."""

from __future__ import annotations

import json
import re
import statistics

import pytest

from benchmarks import compare
from tests.checkout import ROOT
from tests.test_published_claims import missing

pytestmark = pytest.mark.cpu_only

RESULTS = ROOT / "benchmarks" / "results"


def table(name: str, *heads: str) -> list[list[str]]:
    """Return the rows of the tables of a page whose heads begin with these, as cells."""
    blocks = re.findall(r"(?m)(?:^\|.*\n)+", (RESULTS / name).read_text(encoding="utf-8") + "\n")
    rows = [
        [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in each.splitlines()] for each in blocks
    ]
    found = [line for each in rows if each[0][: len(heads)] == list(heads) for line in each[2:]]
    assert found, f"{name} has no table with the heads {heads}"
    return found


def ends(values: list[str], digits: int = 2) -> str:
    numbers = [float(re.sub(r"x$|%$", "", value)) for value in values]
    return f"{min(numbers):.{digits}f} to {max(numbers):.{digits}f}"


def speculation() -> list[str]:
    rows = table("spec_decode_cpu.md", "requests", "drafter", "tokens per step")
    answers, random = ([r for r in rows if ("random" in r[0]) is is_random] for is_random in (False, True))
    return [
        f"decoding came {ends([r[5] for r in answers])}x as fast as plain decoding, and a whole call "
        f"{ends([r[7] for r in answers])}x",
        f"decoding came {ends([r[5] for r in random])}x as fast there",
    ]


def replicas() -> list[str]:
    found = json.loads((RESULTS / "ray_routing.json").read_text(encoding="utf-8"))
    by = {(each["workload"], each["routing"]): each for each in found["rows"]}
    topics, single = ([by[kind, how] for how in ("affinity", "round_robin")] for kind in ("topics", "independent"))
    host, store = ([f"{100 * each['tiers']['host']:.1f}%" for each in pair] for pair in (topics, single))
    first, other = ([f"{each['first_token_ms']['p50']:.0f}" for each in pair] for pair in (topics, single))
    kill = found["kill"]
    assert kill["outcome"]["clean error"] == 2 and found["store"]["found"] == found["store"]["passages"]
    return [
        f"{host[0]} of their tokens were in the memory of the engine that affinity chose, and {host[1]} with round "
        f"robin; with passages drawn one by one, {store[0]} and {store[1]}.",
        f"{first[0]} ms at the median in place of {first[1]} with topics, as the busier engine had "
        f"{100 * topics[0]['busiest']:.0f}% of the requests, and after {other[0]} in place of {other[1]}",
        f"Two streams of {sum(kill['outcome'].values())} ended with an error",
        f"was sent {kill['seconds_to_new_replica']} s later, and the engine answered {kill['answered_by_new_replica']} "
        f"of the requests of the {kill['seconds_after_kill']} s after the kill. The store had all "
        f"{found['store']['found']} passages",
    ]


def autoscaling() -> list[str]:
    found = json.loads((RESULTS / "ray_autoscaling.json").read_text(encoding="utf-8"))
    loads, quiet, settings = found["loads"], found["quiet"], found["settings"]
    assert not any(each["errors"] for each in (quiet, *loads))
    assert not any(each["tokens_stored_by_new_engine"] for each in loads)
    assert quiet["running_on_it"] == quiet["finished_on_it"] == 1
    assert settings["upscale_delay"] == settings["downscale_delay"] == 2
    (start, first), (again, later) = ((each["seconds_to_decision"], each["seconds_to_new_engine"]) for each in loads)
    total = sum(each["streams"] for each in (quiet, *loads))
    return [
        f"{settings['rate']:g} streams began every second",
        f"a second engine {start} s after the load began, and it got its first stream after {first} s. When the load "
        f"had gone and come again, these were {again} and {later} s.",
        f"began to end an engine after {quiet['seconds_to_decision']} s, in the middle of a long stream, and the "
        f"engine was gone after {quiet['seconds_to_end']} s. All {total} streams were answered to their end",
    ]


def eviction() -> list[str]:
    rows = table("kvc_quality.md", "data set", "metric", "allocation")
    quarter = {r[0]: r[5].lstrip("-") for r in rows if r[1] == "kv_compress" and r[3] == "0.25"}
    points = [quarter[name] for name in ("musique_s", "wikimqa_s", "samsum")]
    return [f"cost {points[0]} points of F1 on musique, {points[1]} on wikimqa and {points[2]} of Rouge-L on samsum"]


def compositions() -> list[str]:
    times = [
        [float(cell.split(" ")[0]) if cell else 0.0 for cell in r[1:5]] for r in table("chunks_cpu.md", "prompt tokens")
    ]
    first, second, exactly = (ends([f"{r[0] / r[column]:.1f}" for r in times if r[column]], 1) for column in (1, 2, 3))
    after = {r[0]: r for r in table("chunks_cpu.md", "chunks encoded after", "exact")}["BOS and the system prompt"]
    whole, reuse, own, other = (f"{float(cell):.0f}%" for cell in after[1:5])
    return [
        f"came {first} times sooner than with nothing cached, that of the second question over it {second} "
        f'times, and that of a second question in mode `"exact"` {exactly} times',
        f"answers {own} if it repairs for the question asked, and {other} over pages",
        f"plain reuse answers {reuse} and exact computation {whole}",
    ]


def cascade() -> list[str]:
    steps = [r[-1] for r in table("chunks_cpu.md", "batch", "shared tokens")]
    return [f"took {ends(steps)} times as long in one run"]


def formats() -> list[str]:
    rows = [r for r in table("store_formats.md", "format", "of payload") if r[0] == "int8"]
    largest = max(float(r[2].removesuffix("%")) for r in rows)
    assert [r[6].split(" ")[0] for r in rows if r[3].startswith("question attention")] == ["0.00"] * 4
    return [
        f"int8 takes {largest:.0f}% of what bfloat16 does. ",
        "it cost no F1 with question attention",
    ]


def quickstart() -> list[str]:
    found = json.loads((RESULTS / "quickstart.json").read_text(encoding="utf-8"))
    lines = []
    for pair in zip(found["rows"], found["long_rows"], strict=True):
        cells = [pair[0]["method"]]
        for each in pair:
            low, high = (f"{each[f'ttft_speedup_{end}']:.1f}" for end in ("low", "high"))
            ratio = "" if pair[0] is found["rows"][0] else f"{each['ttft_speedup']:.1f}x ({low} to {high})"
            cells += [ratio, f"{100 * each['recomputed_share']:.1f}"]
        lines.append(" ".join(f"| {' | '.join(cells)} |".split()))
    full, plain, rule, deviation = (f"{100 * each['f1']:.1f}" for each in found["rows"])
    kernels = table("cpu_kernels.md", "pair", "work")
    prefill, decode = (ends([r[4] for r in kernels if r[1] == work], 1) for work in ("full prefill", "a decode step"))
    return [
        *lines,
        f"F1 was {full} by full prefill, {plain} by plain reuse, {rule} by the default rule and {deviation} by value "
        "deviation.",
        f"full prefill by the demo model took {prefill} times as much CPU time without them, and a decode step "
        f"{decode} times",
    ]


def test_ratios_of_the_quickstart_are_those_of_its_samples() -> None:
    found = json.loads((RESULTS / "quickstart.json").read_text(encoding="utf-8"))
    for rows in (found["rows"], found["long_rows"]):
        full = statistics.median(rows[0]["ttft_s"])
        for each in rows:
            assert len(each["ttft_s"]) == each["prompts"]
            assert each["ttft_speedup"] == pytest.approx(full / statistics.median(each["ttft_s"]), abs=1e-3)
    page = (RESULTS / "quickstart.md").read_text(encoding="utf-8")
    assert found["command"] in page and compare.report(found, found["metric"]) in page


CLAIMS = {
    "docs/quickstart.md": quickstart,
    "docs/speculative_decoding.md": speculation,
    "docs/ray.md": lambda: replicas() + autoscaling(),
    "docs/kv_compress.md": eviction,
    "docs/cascade.md": cascade,
    "docs/chunk_api.md": compositions,
    "docs/stores.md": formats,
}


@pytest.mark.parametrize("page", CLAIMS)
def test_sentences_say_what_their_table_has(page: str) -> None:
    assert missing(CLAIMS[page](), (ROOT / page).read_text(encoding="utf-8")) == []


def test_a_changed_figure_is_found() -> None:
    text = (ROOT / "docs" / "kv_compress.md").read_text(encoding="utf-8")
    changed = text.replace("7.4 +- 1.8", "7.5 +- 1.8").replace("7.4 +-\n1.8", "7.5")
    assert len(missing(eviction(), changed)) == 1


def test_losses_by_eviction_are_differences_of_their_scores() -> None:
    rows = table("kvc_quality.md", "data set", "metric", "allocation")
    whole: dict[str, float] = {}
    for cells in rows:
        if cells[3] == "all":
            whole[cells[0].split(" x ")[1]] = float(cells[4])
        else:
            difference = float(cells[5].split(" ")[0])
            assert abs(float(cells[4]) - whole[cells[0]] - difference) < 0.11, cells
    assert len(whole) == 3
