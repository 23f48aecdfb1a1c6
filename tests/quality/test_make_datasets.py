"""Questions about new worlds: of one split, in the pipeline's format."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from vllm_blend.pipeline.datasets import load_dataset, normalize_sample
from vllm_blend.quality.make_datasets import KINDS, WORLDS_PER_CELL, main, make_samples
from vllm_blend.quality.splits import DEVELOPMENT, TEST, TRAINING

pytestmark = pytest.mark.cpu_only


def test_a_file_of_new_worlds_is_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--split", "development", "--families", "4", "--samples", "20", "--output-dir", str(tmp_path)])
    path = tmp_path / "musique_development_4.json"
    assert capsys.readouterr().out == f"20 questions: {path}\n"
    samples = [normalize_sample(raw) for raw in load_dataset(path)]
    assert [sample.kind for sample in samples] == [KINDS[index % 3] for index in range(20)]
    for sample in samples:
        assert sample.gold and sample.answers[0] in " ".join(sample.passages[i].text for i in sample.gold)


def test_every_size_has_worlds_of_its_own() -> None:
    seeds = [
        int(make_samples(split, families, 1)[0]["id"].split("-")[1])
        for split in (DEVELOPMENT, TEST)
        for families in range(1, 9)
    ]
    assert all(after - before >= WORLDS_PER_CELL for before, after in pairwise(seeds))
    assert seeds[0] >= DEVELOPMENT.first + WORLDS_PER_CELL and seeds[-1] + WORLDS_PER_CELL <= TEST.seeds.stop
    assert sum(seed in DEVELOPMENT.seeds and seed + WORLDS_PER_CELL - 1 in DEVELOPMENT.seeds for seed in seeds) == 8


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"split": TRAINING}, "models are trained on the training split"),
        ({"families": 9}, "the number of families is 9: use 1 to 8"),
        ({"samples": 50_001}, "number of samples is 50001: use 1 to 50000"),
        ({"samples": 0}, "number of samples is 0"),
    ],
)
def test_what_can_not_be_made_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_samples(**{"split": TEST, "families": 4, "samples": 1, **changed})


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--split", "test", "--families", "0", "--output-dir", str(tmp_path)])
    assert ended.value.code == 2 and not list(tmp_path.iterdir())
    assert "the number of families is 0: use 1 to 8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--samples", "3", "--output-dir", str(tmp_path)])
    assert "--samples is for new worlds: give --split too" in capsys.readouterr().err and not list(tmp_path.iterdir())
