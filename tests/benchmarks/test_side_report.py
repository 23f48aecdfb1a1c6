"""The table of a side-by-side run: ratios with intervals, floors, and a reason for everything that is absent."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.shapes import MISTRAL_7B
from benchmarks.side import report
from benchmarks.side.floors import Device, Shape, datasheet, floor
from benchmarks.side.rows import PROFILES


def row(name: str, unit: str = "ms", **more: Any) -> dict[str, Any]:
    kept: dict[str, Any] = {
        "name": name,
        "label": f"work {name}",
        "unit": unit,
        "baseline": None,
        "absent": {},
        "floor": 0.005,
    }
    return kept | more


def turn(side: str, samples: dict[str, list[float]], failed: dict[str, str] | None = None) -> dict[str, Any]:
    starts = [{"seconds": 1.0, "versions": {side: "1.0", "CUDA": None}}]
    return {"side": side, "group": "g", "samples": samples, "failed": failed or {}, "starts": starts}


def made(rows: list[dict[str, Any]], turns: list[dict[str, Any]], vllm: str = "0.9, under python") -> dict[str, Any]:
    groups = {"g": {"name": "g", "model": "a-shape", "options": {"max_num_seqs": 4}, "ours": {"enable_blending": True}}}
    about = {"hardware": "a device", "commit": "abc"}
    return {"about": about, "peers": {"vllm": vllm}, "groups": groups, "rows": rows, "turns": turns}


def line(page: str, label: str) -> list[str]:
    [found] = [each for each in page.splitlines() if each.startswith(f"| {label} |")]
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_ratios_have_intervals_and_drift() -> None:
    turns = [
        turn("ours", {"a": [0.010, 0.010, 0.010]}),
        turn("vllm", {"a": [0.020, 0.020, 0.020]}),
        turn("vllm", {"a": [0.030, 0.030, 0.030]}),
        turn("ours", {"a": [0.011, 0.011, 0.011]}),
    ]
    cells = line(report.render(made([row("a")], turns)), "work a")
    assert cells[1:4] == ["ms", "10.50", "25.00"]
    # 25 / 10.5 in the middle; the ends are those of a side that drew one of its turns twice
    assert cells[4] == "2.38x (1.82 to 3.00)"
    assert cells[5:] == ["1.10 / 1.50", "5.00"]


def test_rates_are_per_second_and_few_samples_have_no_interval() -> None:
    turns = [turn("ours", {"a": [0.001, 0.001]}), turn("vllm", {"a": [0.0005, 0.0005]})]
    cells = line(report.render(made([row("a", "tok/s", floor=0.0004)], turns)), "work a")
    assert cells[1:4] == ["tok/s", "1,000", "2,000"] and cells[-1] == "2,500"
    assert cells[4] == "0.50x (too few samples for an interval)"


def test_rows_that_did_not_run_are_absent_with_the_reason() -> None:
    turns = [
        turn("ours", {"a": [0.01] * 3}, {"b": "ValueError: kv_cache_dtype='fp8' is not supported"}),
        turn("vllm", {"b": [0.01] * 3}, {"a": "it did not end within 300 s"}),
        turn("vllm", {}, {"b": "it died"}),
    ]
    none: dict[str, Any] = {"floor": None, "floor_absent": "- floors: no datasheet"}
    page = report.render(made([row("a"), row("b"), row("c", absent={"vllm": "it has no such thing"}, **none)], turns))
    assert line(page, "work a")[2:5] == ["10.00", "absent", "absent"]
    assert line(page, "work b")[2:5] == ["absent", "10.00", "absent"]
    assert line(page, "work c")[-1] == "absent"
    assert "- work a, vllm: it did not end within 300 s" in page
    assert "- work b, ours: ValueError: kv_cache_dtype='fp8' is not supported" in page
    assert "- work b, vllm: in one of its turns: it died" in page
    assert "- work c, vllm: it has no such thing" in page and page.count("- floors: no datasheet") == 1


def test_a_side_that_was_not_asked_for_has_no_column() -> None:
    page = report.render(made([row("a")], [turn("ours", {"a": [0.01] * 3})], "absent: no --vllm-python was given"))
    assert "- vllm: absent: no --vllm-python was given" in page
    assert line(page, "work a") == ["work a", "ms", "10.00", "5.00"]
    assert "- work a, vllm" not in page


def test_a_row_is_compared_with_its_baseline() -> None:
    rows = [row("base"), row("blend", baseline="base")]
    turns = [turn("ours", {"base": [0.1] * 3, "blend": [0.01] * 3}), turn("vllm", {"base": [0.2] * 3})]
    cells = line(report.render(made(rows, turns)), "work blend")
    assert cells[2:5] == ["10.00", "200.0 (its baseline)", "20.00x (20.00 to 20.00)"]


def test_options_and_versions_are_said() -> None:
    page = report.render(made([row("a")], [turn("ours", {"a": [0.01]})]))
    assert "- g (a-shape): `max_num_seqs=4`; ours also `enable_blending=True`" in page
    assert "| ours | ours 1.0 |" in page and "CUDA" not in page


@pytest.mark.parametrize(
    ("card", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
    ],
)
def test_cards_are_known_by_their_names(card: str, name: str) -> None:
    found = datasheet(card)
    assert found is not None and found.name == name


def test_an_unknown_card_has_no_datasheet() -> None:
    assert datasheet("NVIDIA L400") is None and datasheet("AMD EPYC") is None


def test_floors_of_a_7b_model() -> None:
    shape = Shape.from_config(MISTRAL_7B)
    assert shape.kv_bytes == 128 * 1024
    # The published size of Mistral-7B: its layers, the output layer and an embedding of the same size.
    assert shape.layer_weights + 2 * shape.head_weights == pytest.approx(7.24e9, rel=0.002)
    device = Device("a device", 784e12, 4.2e12)
    rows = {each.name: floor(each, MISTRAL_7B, device) for each in PROFILES["gpu"]().rows}
    # benchmarks.engine_gpu counts the same by hand, for the same two figures.
    assert 1e3 * rows["prefill_4096"] == pytest.approx(80.0, rel=0.05)
    assert 1e3 * rows["prefill_32000"] == pytest.approx(923.0, rel=0.05)
    assert 1e3 * rows["decode_b1_4096"] == pytest.approx(3.4, rel=0.05)
    assert 1e3 * rows["decode_b32_4096"] == pytest.approx(7.4, rel=0.05)
    assert 1e3 * rows["decode_b128_2048"] == pytest.approx(11.5, rel=0.05)
    assert rows["rag_one_reuse"] < rows["rag_one_question_8"] < rows["rag_one_question_15"] < rows["rag_one"]
    assert rows["rag_many_question_8"] < rows["rag_many_cold_question_8"] < rows["rag_many"]
    assert rows["long_kvc_8x"] <= rows["long"] and rows["decode_b32_4096_fp8_kv"] < rows["decode_b32_4096"]
