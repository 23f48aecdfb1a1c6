"""Held-out measurements: what they ask, what they keep, what they refuse, and what their tables say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import tiny_model
from tests.quality.answers import ABOUT, answered, measured
from vllm_blend.quality import held_out, held_out_worlds
from vllm_blend.quality.held_out_file import Cell, HeldOut, find_read, read_held_out, write_held_out
from vllm_blend.quality.held_out_parts import FinishedParts
from vllm_blend.quality.held_out_report import render
from vllm_blend.quality.held_out_worlds import digest_of, held_out_questions, world_of
from vllm_blend.quality.parallel import sweep_lists
from vllm_blend.quality.questions import Questions
from vllm_blend.quality.session import EngineFacts, Session
from vllm_blend.quality.splits import DEVELOPMENT
from vllm_blend.quality.sweep import Known


def test_questions_are_of_the_split_and_of_all_kinds() -> None:
    parts = held_out_questions(DEVELOPMENT, 2, samples=49, per_world=3)
    samples = [sample for part in parts for sample in part.samples]
    assert [len(part.samples) for part in parts] == [48, 1] and parts[0].name == "2 families, plain"
    worlds = [int(world_of(sample.sample_id)) for sample in samples]
    assert worlds == [worlds[0] + number // 3 for number in range(49)] and worlds[0] in DEVELOPMENT.seeds
    assert [sample.kind for sample in samples[:6]] == ["1hop", "cross", "2hop"] * 2
    assert len({sample.sample_id for sample in samples}) == 49 and all(s.gold and s.answers[0] for s in samples)
    [later] = held_out_questions(DEVELOPMENT, 2, samples=3, per_world=3, first_world=2)
    assert later.samples == tuple(samples[6:9])
    assert digest_of(later.samples) == digest_of(samples[6:9]) != digest_of(samples[6:8])
    [wild] = held_out_questions(DEVELOPMENT, 2, "wild", samples=3, titles=True, pages=False)
    assert wild.name == "2 families, wild, titled, without pages" and wild.style.name == "wikimqa"
    assert parts[0].pages and not wild.pages
    other = replace(samples[6], passages=samples[6].passages[1:])
    assert digest_of([other]) != digest_of(samples[6:7])


def test_a_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    known = measured(answered("rule", 0.15, "1101"))
    write_held_out(tmp_path / "a.json", known)
    found = read_held_out(tmp_path / "a.json")
    assert found.about == known.about and render([found]) == render([known])
    [cell], [expected] = found.cells, known.cells
    assert (cell.questions, cell.kinds, cell.digest) == (expected.questions, expected.kinds, "d")
    assert (cell.passages, cell.left_out) == (expected.passages, expected.left_out)
    assert [run.wrong for run in cell.runs] == [run.wrong for run in expected.runs]
    for text in (
        '{"about": {}}',
        "[]",
        (tmp_path / "a.json").read_text().replace('"correct":"1101"', '"correct":"1111"'),
        (tmp_path / "a.json").read_text().replace('"correct":"1101"', '"correct":"11011"'),
    ):
        (tmp_path / "b.json").write_text(text)
        with pytest.raises(ValueError, match="does not hold answers of held-out questions"):
            read_held_out(tmp_path / "b.json")


def test_the_table_compares_over_the_same_questions() -> None:
    one, other = measured(answered("rule", 0.15, "1100")), measured(answered("better", 0.15, "1111", 0.5))
    text = render([one, other], over="rule@0.15")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert [line[:3] for line in lines[2:]] == [
        ["full prefill", "", "100.0"],
        ["plain reuse", "0%", "25.0"],
        ["rule", "15%", "25.0"],
        ["better", "15%", "50.0"],
    ]
    heads = ["setting", "ratio", "token-layers", "exact match", "1hop", "2hop", "kept", "over rule@0.15"]
    assert lines[0] == heads
    better = dict(zip(heads, lines[-1], strict=True))
    assert better["exact match"].startswith("100.0") and better["kept"].startswith("133.3 (")
    assert better["over rule@0.15"] == "50.0 (0.0 to 100.0)"  # all in one world of two
    assert lines[4][4:6] == ["50.0", "50.0"] and lines[4][-1] == ""
    assert "4 questions about 2 worlds, 8 to 12 passages" in text and "- left out as too long: a\n" in text
    with pytest.raises(
        ValueError, match=r"--over 'rul' is not measured: use one of full prefill, plain reuse@0, rule@0.15"
    ):
        render([one], over="rul")
    with pytest.raises(ValueError, match="no answers: the measurement was interrupted"):
        render([HeldOut(ABOUT | {"runs": []}, (Cell("c", ("test-1-1",), ("1hop",), (1, 1), "d"),))])


def test_intervals_are_over_worlds_and_allow_for_one_that_was_not_seen() -> None:
    """Worlds whose questions are all answered alike tell no more with three questions each than with one."""
    tables = []
    for each in (1, 3):
        names = tuple(f"test-{world}-{number}" for world in range(12) for number in range(each))
        runs = [
            answered(setting, ratio, "".join(one * each for one in correct))
            for setting, ratio, correct in (
                ("full prefill", None, "1" * 12),
                ("plain reuse", 0.0, "010101010101"),
                ("rule", 0.1, "1" * 12),
            )
        ]
        cell = Cell("c", names, ("1hop",) * len(names), (1, 1), "d", (), tuple(runs))
        tables.append([line for line in render([HeldOut(ABOUT | {"runs": []}, (cell,))]).splitlines() if "|" in line])
    assert tables[0] == tables[1]
    kept = tables[0][-1].split("|")[-3].strip()
    assert kept.startswith("100.0 (7") and kept != "100.0 (100.0 to 100.0)"  # 1 - 0.025 ** (1 / 12) may be lost


def test_what_was_measured_again_or_over_other_texts_is_shown_apart() -> None:
    first, again = measured(answered("rule", 0.15, "1100")), measured(answered("rule", 0.15, "0011"))
    lines = [line.split("|")[1].strip() for line in render([first, again]).splitlines() if line.startswith("| ")]
    assert lines == ["setting", "full prefill", "plain reuse", "rule", "rule (again)"]
    for other in (
        HeldOut(first.about, (replace(first.cells[0], digest="e"),)),
        HeldOut(dict(first.about) | {"dtype": "bfloat16"}, first.cells),
    ):
        assert render([first, other]).count("4 questions about 2 worlds") == 2


def test_what_was_read_is_known_by_weights_worlds_setting_and_ratio(tmp_path: Path) -> None:
    write_held_out(tmp_path / "a.json", measured(answered("rule", 0.15, "1111")))
    [line] = find_read(
        tmp_path, measured(answered("rule", 0.15, "0000"), answered("new", 0.1, "0000"), first=5_000_001)
    )
    assert line == f"{tmp_path / 'a.json'} (2 families): rule at 15%"
    for other in (
        measured(answered("rule", 0.1, "1111")),
        measured(answered("rule", 0.15, "1111"), first=5_000_002),
        *(
            HeldOut(dict(measured().about) | {"runs": [["rule", 0.15]], name: "other"}, measured().cells)
            for name in ("weights", "dtype", "split")
        ),
    ):
        assert find_read(tmp_path, other) == []
    assert find_read(tmp_path / "none", measured(answered("rule", 0.15, "1111"))) == []
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(ValueError, match=r"must have no JSON files but such answers: .*b\.json does not hold"):
        find_read(tmp_path, measured(answered("rule", 0.15, "1111")))


def interrupted(*args: Any, **options: Any) -> Any:
    """Sweep until all is checked, and no further."""

    def then_fail(engine: EngineFacts, data: list[Questions]) -> None:
        check(engine, data)
        raise RuntimeError("the power failed")

    crew, model, questions, runs, batch, progress, check, known, done = args
    return sweep_lists(crew, model, questions, runs, batch, progress, then_fail, known, done, **options)


@pytest.mark.cpu_only
@pytest.mark.usefixtures("forked_workers")
def test_workers_begin_after_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read before is refused, and nothing is computed, however many workers there would be."""
    monkeypatch.setattr(held_out_worlds, "PART_WORLDS", 1)
    model = tiny_model("llama", max_position_embeddings=1536)
    flags = ["--split", "test", "--families", "1", "--samples", "2", "--per-world", "1", "--dtype", "float32"]
    flags += ["--settings", "first_tokens@0.1", "--device", "cpu"]
    monkeypatch.setattr(held_out, "sweep_lists", interrupted)
    for name, workers, message in (
        ("a", "1", "the power failed"),
        ("b", "2", "a.json (1 family, plain): first_tokens at 10%"),
    ):
        with pytest.raises(SystemExit):
            held_out.main([model, *flags, "--output", str(tmp_path / f"{name}.json"), "--workers", workers])
        assert message in capsys.readouterr().err
        monkeypatch.setattr(Session, "__init__", lambda *arguments: pytest.fail("an engine started in this process"))
    assert (tmp_path / "a.json").exists() and not (tmp_path / "b.json").exists()
    [begun] = tmp_path.glob("*.unfinished")
    assert len(begun.read_text().splitlines()) == 1


def test_the_command_measures_the_test_split_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama", max_position_embeddings=1536)
    flags = ["--split", "test", "--families", "1", "--samples", "2", "--per-world", "1", "--dtype", "float32"]
    flags += ["--settings", "first_tokens@0.1", "oracle: gold passages", "--ratios", "0.5", "--batch", "2"]
    monkeypatch.setattr(held_out, "sweep_lists", interrupted)
    with pytest.raises(SystemExit):
        held_out.main([model, *flags, "--output", str(tmp_path / "begun.json")])
    assert "the power failed" in capsys.readouterr().err
    monkeypatch.undo()
    with pytest.raises(SystemExit):
        held_out.main([model, *flags, "--output", str(tmp_path / "a.json")])
    assert "begun.json (1 family, plain): first_tokens at 10%" in capsys.readouterr().err
    (tmp_path / "begun.json").unlink()
    (tmp_path / "begun.json.unfinished").unlink()
    held_out.main([model, *flags, "--output", str(tmp_path / "a.json")])
    said = capsys.readouterr().out
    found = read_held_out(tmp_path / "a.json")
    runs = {(run.setting, run.ratio): run for run in found.cells[0].runs}
    assert list(runs) == [
        ("full prefill", None),
        ("plain reuse", 0.0),
        ("first_tokens", 0.1),
        ("oracle: gold passages", 0.5),
    ]
    costs = [run.token_layers for run in runs.values()]
    assert costs[0] == 1 and costs[1] < costs[2] < costs[3] < 1
    assert all(len(run.wrong) == 2 - run.correct.sum() for run in runs.values())
    about: dict[str, Any] = dict(found.about)
    assert about["runs"] == [
        ["first_tokens", 0.1],
        ["oracle: gold passages", 0.5],
    ]
    assert "| first_tokens | 10% |" in said and "2 questions about 2 worlds, " in said
    for more, message in (
        (["--output", str(tmp_path / "a.json")], "exists, and records what was read"),
        (
            ["--output", str(tmp_path / "b.json")],
            r"a.json (1 family, plain): first_tokens at 10%, oracle: gold passages at 50%",
        ),
    ):
        with pytest.raises(SystemExit):
            held_out.main([model, *flags, *more])
        assert message in capsys.readouterr().err
    assert not (tmp_path / "b.json").exists()
    held_out.main([model, *flags, "--output", str(tmp_path / "b.json"), "--again"])
    held_out.main(["--report", str(tmp_path / "a.json"), "--over", "first_tokens"])
    assert "| over first_tokens |" in capsys.readouterr().out


@pytest.mark.cpu_only
@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize(
    ("workers", "samples", "settings", "left"),
    [
        (1, 3, ["first_tokens@0.1", "value_deviation@0.1", "gradual@0.1"], 4),  # of three lists by two engines
        (2, 5, ["relevant_passages@0.2"], 3),  # of five lists by one engine, which each worker starts
    ],
)
def test_an_interrupted_run_goes_on_where_it_was(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    samples: int,
    settings: list[str],
    left: int,
) -> None:
    """After it finished two lists of worlds, and was cut off while it wrote. One worker measures the whole: several,
    each of which measures some of the lists, find what one does. Scores of a few questions are shown by neither."""
    monkeypatch.setattr(held_out_worlds, "PART_WORLDS", 1)
    model = tiny_model("llama", max_position_embeddings=1536, num_hidden_layers=5)
    flags = ["--split", "test", "--families", "1", "--samples", str(samples), "--per-world", "1", "--batch", "2"]
    flags += ["--dtype", "float32", "--settings", *settings, "--device", "cpu", "--again"]
    held_out.main([model, *flags, "--output", str(tmp_path / "whole.json"), "--workers", "1"])
    said = capsys.readouterr().err
    assert "at 20%" not in said and "done by 2 workers" not in said
    flags += ["--workers", str(workers)]
    assert not list(tmp_path.glob("*.unfinished"))
    whole = read_held_out(tmp_path / "whole.json")

    add = FinishedParts.add

    def then_fail(self: FinishedParts, index: int, known: Known) -> None:
        add(self, index, known)
        if len(self.path.read_text().splitlines()) == 3:
            with self.path.open("a") as file:
                file.write('{"part": 2, "full": {"exa')
            raise RuntimeError("the power failed")

    output = tmp_path / "a.json"
    monkeypatch.setattr(FinishedParts, "add", then_fail)
    with pytest.raises(SystemExit):
        held_out.main([model, *flags, "--output", str(output)])
    monkeypatch.setattr(FinishedParts, "add", add)
    before = output.read_bytes()
    for more, message in (
        ([], "a.json.unfinished is of an interrupted run: go on with --resume, or delete the file"),
        (
            ["--resume", "--samples", "2", "--workers", "1"],
            "is of another measurement, as questions differ: give the same arguments",
        ),
    ):
        with pytest.raises(SystemExit):
            held_out.main([model, *flags, "--output", str(output), *more])
        assert message in capsys.readouterr().err
        assert output.read_bytes() == before

    measured: list[int] = []
    monkeypatch.setattr(FinishedParts, "add", lambda self, index, known: measured.append(index))
    held_out.main([model, *flags, "--output", str(output), "--resume"])
    assert len(measured) == left and not list(tmp_path.glob("*.unfinished"))
    said = capsys.readouterr().err
    assert "at 20%" not in said and ("done by 2 workers" in said) is (workers == 2)
    found = read_held_out(output)
    one, other = ({**each.about, "command": "", "date": "", "threads": 0, "workers": 0} for each in (whole, found))
    assert one == other
    assert [each.about["workers"] for each in (whole, found)] == [1, workers]
    [cell], [expected] = found.cells, whole.cells
    assert len(set(cell.questions)) == samples and cell.questions == expected.questions
    assert (cell.digest, cell.kinds, cell.left_out) == (expected.digest, expected.kinds, expected.left_out)
    for run, same in zip(cell.runs, expected.runs, strict=True):
        assert (run.setting, run.ratio, run.wrong) == (same.setting, same.ratio, same.wrong)
        assert run.token_layers == pytest.approx(same.token_layers) and (run.correct == same.correct).all()
    output.unlink()
    with pytest.raises(SystemExit):
        held_out.main([model, *flags, "--output", str(output), "--resume"])
    assert "--resume: there is no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--samples", "0"], "the number of samples is 0: use 1 to"),
        (["--families", "2", "2"], "--families [2, 2]: give each number once"),
        (["--settings", "randm"], "the setting 'randm' is unknown: there are value_deviation"),
        (["--settings", "random@x"], "'random@x' must end with shares from 0 to 1"),
        (["--settings", "random@2"], "'random@2': a ratio=2.0 is a share"),
        (["--settings", "random", "random@0.1"], "'random' is given twice"),
        (["--settings", "random@0.1", "--over", "random@0.2"], "--over 'random@0.2' is not measured: use one of full"),
        (["--first-world", "-1"], "the first world is -1: use 0 or more"),
        (["--workers", "0"], "the number of workers is 0: use 1 or more"),
        (["--by-budget", "--over", "random"], "--by-budget compares with nothing: leave out --over"),
        (["--report", "a.json"], "give a MODEL and --output FILE to measure, or --report FILE... alone"),
    ],
)
def test_bad_input_ends_with_a_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    with pytest.raises(SystemExit):
        held_out.main(["no-model", "--output", str(tmp_path / "a.json"), *flags])
    assert message in capsys.readouterr().err
