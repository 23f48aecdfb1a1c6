"""Sides take turns in processes of their own, and a row that fails, hangs or kills its process is absent, with why."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import side_by_side
from benchmarks.side.rows import PROFILES, Group, Profile, Row, real
from benchmarks.side.turns import LLAMA, OURS, ROOT, TRANSFORMERS, VLLM, DeviceMemory, Limits, Side, Turn, run_turn
from benchmarks.side.worker import KINDS, Ours, joined
from tests.benchmarks.other_engine import DIES, HANGS, RAISES, write_interpreter

pytestmark = pytest.mark.cpu_only


def prefill(tokens: int, group: str = "demo", **more: Any) -> Row:
    return Row(f"prefill_{tokens}", f"full prefill, {tokens}", group, "prefill", "ms", {"tokens": tokens}, **more)


def spec(*rows: Row, **options: Any) -> dict[str, Any]:
    told = [
        {"name": row.name, "kind": row.kind, "work": row.work, "ours": row.ours, "warm_up": 1, "repeats": 3}
        for row in rows
    ]
    return {"model": "nowhere", "options": options, "seed": 0, "vocabulary": 500, "rows": told}


@pytest.fixture
def other(tmp_path: Path) -> Side:
    return Side(VLLM, str(write_interpreter(tmp_path)))


def test_a_side_measures_under_its_own_interpreter(other: Side) -> None:
    turn = Turn(VLLM, "demo", 0)
    decode = Row("decode", "decode", "demo", "decode", "ms a step", {"batch": 2, "context": 4, "steps": 3})
    run_turn(other, turn, spec(prefill(16), decode), Limits(60, 60))
    assert turn.failed == {} and len(turn.samples["prefill_16"]) == len(turn.samples["decode"]) == 3
    assert all(seconds >= 0.002 for seconds in turn.samples["prefill_16"])
    [start] = turn.starts
    assert start["versions"]["vllm"] == "9.9" and start["versions"]["torch"] == "9.8"


def test_rows_that_fail_are_absent_and_the_others_go_on(other: Side) -> None:
    turn = Turn(VLLM, "demo", 0)
    began = time.monotonic()
    rows = [prefill(RAISES), prefill(5), prefill(HANGS), prefill(6), prefill(DIES), prefill(7)]
    run_turn(other, turn, spec(*rows), Limits(60, 2))
    assert sorted(turn.samples) == ["prefill_5", "prefill_6", "prefill_7"]
    assert turn.failed["prefill_101"] == "RuntimeError: out of memory"
    assert turn.failed["prefill_102"] == "it did not end within 2 s"
    assert turn.failed["prefill_103"] == "its process ended with status 7: killed by a signal of its own"
    assert len(turn.starts) == 3  # one process anew for each that was lost
    assert time.monotonic() - began < 600  # not the hour that the one that hangs would take


def test_an_engine_that_refuses_is_absent_with_its_own_words(other: Side) -> None:
    turn = Turn(VLLM, "demo", 0)
    run_turn(other, turn, spec(prefill(5), prefill(6), kv_cache_dtype="fp9"), Limits(60, 60))
    assert turn.samples == {} and set(turn.failed) == {"prefill_5", "prefill_6"}
    assert turn.failed["prefill_5"] == "ValueError: kv_cache_dtype 'fp9' is unknown"


def test_an_engine_that_never_starts_is_absent(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 3600\n")
    program.chmod(0o755)
    turn = Turn(VLLM, "demo", 0)
    run_turn(Side(VLLM, str(program)), turn, spec(prefill(5)), Limits(0.5, 60))
    assert turn.failed == {"prefill_5": "the engine did not start within 0.5 s"}


def test_our_alias_is_not_taken_for_vllm(tmp_path: Path) -> None:
    alias = tmp_path / "python"
    alias.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}/vllm_blend/compat:{ROOT}" exec "{sys.executable}" "$@"\n')
    alias.chmod(0o755)
    turn = Turn(VLLM, "demo", 0)
    run_turn(Side(VLLM, str(alias)), turn, spec(prefill(5)), Limits(120, 60))
    assert "the name vllm is taken by vllm_blend" in turn.failed["prefill_5"]


def test_turns_alternate() -> None:
    sides = [Side("A"), Side("B")]
    assert [side.name for _, side in side_by_side.order(sides, 3)] == ["A", "B", "B", "A", "A", "B"]
    assert [number for number, _ in side_by_side.order(sides, 2)] == [0, 0, 1, 1]


def test_a_row_that_failed_is_not_tried_again_and_baselines_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int, list[str]]] = []

    def pretend(side: Side, turn: Turn, told: dict[str, Any], limits: Limits) -> None:
        ran.append((side.name, turn.number, [row["name"] for row in told["rows"]]))
        for row in told["rows"]:
            if side.name == VLLM and row["name"] == "prefill_2":
                turn.failed[row["name"]] = "lost"
            else:
                turn.samples[row["name"]] = [1.0]

    monkeypatch.setattr(side_by_side, "run_turn", pretend)
    rows = [prefill(1), prefill(2), prefill(3, baseline="prefill_1"), prefill(4, absent={VLLM: "it cannot"})]
    profile = Profile((Group("demo", "inputs/demo-model", {}),), tuple(rows))
    args = argparse.Namespace(turns=2, start_timeout=1, row_timeout=1, repeats=1, warm_up=1, rate_repeats=1, seed=0)
    models, memory = {"inputs/demo-model": ROOT / "inputs" / "demo-model"}, DeviceMemory("cpu")
    turns = list(side_by_side.take_turns(profile, rows, [Side(OURS), Side(VLLM)], models, args, memory))
    everything = ["prefill_1", "prefill_2", "prefill_3", "prefill_4"]
    assert ran == [
        (OURS, 0, everything),
        (VLLM, 0, ["prefill_1", "prefill_2"]),
        (VLLM, 1, ["prefill_1"]),
        (OURS, 1, everything),
    ]
    assert [turn.side for turn in turns] == [OURS, VLLM, VLLM, OURS]


def test_groups_run_on_the_sides_that_read_their_model(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, str]] = []
    monkeypatch.setattr(side_by_side, "run_turn", lambda side, turn, *rest: ran.append((turn.group, side.name)))
    monkeypatch.setattr(side_by_side, "make_spec", lambda *given: {})
    profile = real("model.gguf", "model")
    args = argparse.Namespace(turns=1, start_timeout=1, row_timeout=1)
    sides, models = [Side(OURS), Side(VLLM), Side(TRANSFORMERS), Side(LLAMA)], {"model.gguf": ROOT, "model": ROOT}
    assert list(side_by_side.take_turns(profile, profile.rows, sides, models, args, DeviceMemory("cpu")))
    assert ran == [
        *[("file", side) for side in (OURS, LLAMA)],
        *[("file-rag", side) for side in (OURS, LLAMA)],
        *[("directory", side) for side in (OURS, VLLM, TRANSFORMERS)],
        *[("directory-rag", side) for side in (OURS, VLLM)],
    ]


def test_other_prompts_are_noticed() -> None:
    turns = [{"side": OURS, "prompts": {"a": "1"}}, {"side": VLLM, "prompts": {"a": "1"}}]
    side_by_side.check_prompts({"turns": turns})
    with pytest.raises(RuntimeError, match="a: vllm had other prompts"):
        side_by_side.check_prompts({"turns": [*turns, {"side": VLLM, "prompts": {"a": "2"}}]})


@pytest.mark.slow
def test_our_engine_beside_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = write_interpreter(tmp_path)
    output = tmp_path / "out" / "sides"
    only_two = {VLLM: "9.9"}, [Side(OURS), Side(VLLM, str(program))]
    monkeypatch.setattr(side_by_side, "find_sides", lambda args: only_two)
    command = ["--profile", "cpu", "--rows", "rag_one_question_15", "--turns", "1", "--warm-up", "1", "--repeats", "3"]
    assert side_by_side.main([*command, "--output", str(output)]) == 0
    report = json.loads(output.with_suffix(".json").read_text())
    measured = {(turn["side"], row): len(found) for turn in report["turns"] for row, found in turn["samples"].items()}
    assert measured == {(OURS, "rag_one_question_15"): 3, (OURS, "rag_full"): 3, (VLLM, "rag_full"): 3}
    prompts = [turn["prompts"]["rag_full"] for turn in report["turns"] if "rag_full" in turn["prompts"]]
    assert len(prompts) == 2 and prompts[0] == prompts[1]
    page = output.with_suffix(".md").read_text()
    assert "| vllm | vllm 9.9, torch 9.8" in page and "| ours | vllm_blend " in page
    assert "(its baseline)" in page
    again = tmp_path / "again"
    assert side_by_side.main(["--from", str(output.with_suffix(".json")), "--output", str(again)]) == 0
    assert again.with_suffix(".md").read_text() == page


def test_bad_arguments_are_refused_before_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def error(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            side_by_side.main(["--profile", "cpu", "--output", str(tmp_path / "x" / "y"), *arguments])
        assert ended.value.code == 2 and not (tmp_path / "x").exists()
        return " ".join(capsys.readouterr().err.split())

    assert "--rows nothing: there are prefill_256" in error("--rows", "nothing")
    assert "--turns 0 must be positive" in error("--turns", "0")
    assert "give both or neither" in error("--peak-tflops", "3")
    assert "is not a program: give the bin/python" in error("--vllm-python", str(tmp_path / "python"))
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
    bare.chmod(0o755)
    assert "has no vLLM" in error("--vllm-python", str(bare))
    assert "missing.gguf does not exist" in error("--gguf", str(tmp_path / "missing.gguf"))
    assert "give both --llama-cpp-python and --gguf, or neither" in error("--gguf", str(bare))
    assert "are for --profile cpu" in error("--profile", "gpu", "--directory", str(tmp_path))


def test_the_other_interpreter_says_its_version(other: Side) -> None:
    assert side_by_side.upstream_version(other) == "9.9"


@pytest.mark.parametrize("name", [*sorted(PROFILES), "real"])
def test_profiles_hold_together(name: str) -> None:
    profile = PROFILES[name]() if name in PROFILES else real("model.gguf", "model")
    names = [row.name for row in profile.rows]
    assert len(set(names)) == len(names)
    assert {row.group for row in profile.rows} == {group.name for group in profile.groups}
    by_name = {row.name: row for row in profile.rows}
    for row in profile.rows:
        assert row.kind in KINDS
        assert row.baseline is None or by_name[row.baseline].baseline is None
        assert set(row.absent) <= {VLLM, TRANSFORMERS} and (name != "gpu" or TRANSFORMERS not in row.absent)
    blended = next(row for row in profile.rows if row.baseline)
    assert [row.name for row in profile.named([blended.name])] == [blended.baseline, blended.name]


def test_blended_and_plain_prompts_have_the_same_tokens() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.calls: list[list[list[int]]] = []

        def prompt(self, pieces: list[list[int]], more: object) -> list[int]:
            return joined(pieces)

        def seconds(self, prompts: list[list[int]], tokens: list[int], temperature: float) -> float:
            self.calls.append(prompts)
            return 1.0

    [one] = [row for row in PROFILES["cpu"]().rows if row.name == "rag_one"]
    engines, digests = [Recorder(), Recorder()], []
    for engine, ours in zip(engines, (None, {"blend_selector": "none"}), strict=True):
        work = KINDS["rag"]({"work": one.work, "ours": ours}, {"seed": 3, "vocabulary": 500})
        assert [work.sample(engine) for _ in range(2)] == [1.0, 1.0]
        digests.append(work.digest())
    assert engines[0].calls == engines[1].calls and digests[0] == digests[1]
    stored, first, second = engines[0].calls[:-2], *engines[0].calls[-2:]
    assert len(stored) == one.work["pool"] // one.work["passages"]
    length = one.work["prefix"] + one.work["passages"] * one.work["passage"] + one.work["question"]
    assert len(first[0]) == len(second[0]) == length and first != second


class _Stepping:
    """An engine whose running requests get a token in every step, and others after three."""

    salt = ""

    def __init__(self, ends: bool = False) -> None:
        self.llm = SimpleNamespace(llm_engine=self)
        self.left: dict[str, int] = {}
        self.steps, self.ends, self.arrived = 0, ends, list[int]()

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        assert name not in self.left
        self.left[name] = 3 if name.startswith("arriving") else -1
        if self.left[name] == 3:
            self.arrived.append(self.steps)

    def step(self) -> list[Any]:
        self.steps += 1
        outputs = []
        for name, left in list(self.left.items()):
            self.left[name] = left - 1
            if left < 0 or left == 1:
                finished = left == 1 or (self.ends and self.steps > 5)
                outputs.append(SimpleNamespace(request_id=name, finished=finished, error=None, blend=None))
            if left == 1:
                del self.left[name]
        return outputs

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            del self.left[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)


def _ours(stepping: _Stepping) -> Ours:
    engine = Ours.__new__(Ours)
    engine.llm = stepping.llm
    engine.__dict__["module"] = SimpleNamespace(SamplingParams=dict)
    return engine


def test_gaps_are_those_between_tokens_of_running_requests() -> None:
    """A prompt arrives when as many steps have passed since the one before it was answered, and a gap is one step."""
    stepping = _Stepping()
    gaps = _ours(stepping).gaps([[1], [2]], 100, [{}, {}], between=4)
    assert len(gaps) == 2 * (4 + 3) and all(gap >= 0 for gap in gaps)
    assert stepping.arrived == [1 + 4, 1 + 4 + 3 + 4] and stepping.left == {}
    with pytest.raises(RuntimeError, match="a running request ended after 100 tokens"):
        _ours(_Stepping(ends=True)).gaps([[1]], 100, [{}], between=8)


def test_a_gap_row_takes_the_99th_percentile() -> None:
    row = {"work": next(row for row in PROFILES["cpu"]().rows if row.name == "gap").work, "ours": None}
    work = KINDS["gap"](row, {"vocabulary": 500, "seed": 0})
    asked: list[tuple[int, int, int]] = []

    class Engine:
        prompt, seconds = staticmethod(lambda pieces, more: joined(pieces)), staticmethod(lambda *_: 0.0)

        def gaps(self, running: list[Any], tokens: int, arriving: list[Any], between: int) -> list[float]:
            asked.append((len(running), len(arriving), between))
            return [float(value) for value in range(200, 0, -1)]

    assert work.sample(Engine()) == 198.0
    assert asked == [(4, 2, 6)]
