"""The table of rules and companies: its files, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.real_text import main, page
from tests.quality.small import MODEL, write_small
from vllm_blend.pipeline.files import read_json

pytestmark = pytest.mark.cpu_only


def test_the_files_hold_every_question_and_give_the_page_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = write_small(tmp_path), tmp_path / "out" / "table"
    flags = [
        "--rules",
        "none",
        "random@0.2",
        "--companies",
        "page",
        "bos",
        "--over",
        "random@0.2",
        "--note",
        "synthetic",
    ]
    main([MODEL, "--data", str(data), *flags, "--batch", "4", "--output", str(output)])
    found = read_json(output.with_suffix(".json"), "table")
    text = output.with_suffix(".md").read_text(encoding="utf-8")
    assert page(found) == text and capsys.readouterr().out == f"{text}\n"
    assert found["about"]["command"].startswith("python -m benchmarks.real_text demo-model --data musique_small.json ")
    assert found["about"]["questions"] == ["3 of musique_small (passages, asked by style musique)"]
    assert found["about"]["notes"] == ["synthetic"] and "musique_small after bos" in text
    names = ["none (page)", "random 20% (page)", "none (bos)", "random 20% (bos)"]
    assert [row["setting"] for row in found["rows"]][2:] == names
    assert found["rows"][3]["kl_over"] == 0 != found["rows"][2]["kl_over"]
    columns = found["questions"]["musique_small"]
    assert len(columns["id"]) == 3 and all(len(columns[name]["kl"]) == 3 for name in names)
    mean = sum(columns["none (page)"]["kl"]) / 3
    assert found["rows"][2]["kl"] == pytest.approx(mean, rel=1e-3)
    output.with_suffix(".md").unlink()
    main(["--report", str(output.with_suffix(".json"))])
    assert output.with_suffix(".md").read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give a MODEL and --data FILE, or --report FILE"),
        ([MODEL, "--data", "nowhere.json"], "nowhere.json"),
        (["--report", "nowhere.json"], "nowhere.json"),
        ([MODEL, "--data", "{data}", "--over", "auto@0.5"], "--over auto@0.5 is not measured"),
        ([MODEL, "--data", "{data}", "--over", "auto"], "--over auto is not measured"),
        ([MODEL, "--data", "{data}", "--rules", "randm"], "'randm' is unknown"),
    ],
)
def test_mistakes_are_found_before_anything_is_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    data = str(write_small(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main([word.format(data=data) for word in flags])
    assert ended.value.code == 1 and message in capsys.readouterr().err
