"""`vllm-blend check-model` on two ranks: the verdict and the rows of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import threads
from tests.quality.small import MODEL, write_small
from vllm_blend.command_line import BAD_INPUT
from vllm_blend.pipeline.files import read_json
from vllm_blend.quality import check_model as module
from vllm_blend.quality.session import Session

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("data"), 1)


def check(data: Path, output: Path, size: int) -> tuple[int, dict[str, Any]]:
    flags = [MODEL, "--data", str(data), "--min-questions", "1", "--rules", "none", "question_attention@0.15"]
    flags += ["--device", "cpu", "--tensor-parallel-size", str(size), "--output", str(output)]
    flags += ["--chunk-store-path", str(output.parent)]
    with threads(1):
        status = module.main(flags)
    return status, read_json(output, "rows")


def test_the_rows_are_those_of_one_rank(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    enter = Session.__enter__

    def noted(session: Session) -> Session:
        sizes.append(session.engine.config.tensor_parallel_size)
        return enter(session)

    monkeypatch.setattr(Session, "__enter__", noted)
    (status, one), (other_status, two) = (check(data, tmp_path / f"{size}.json", size) for size in (1, 2))
    assert sizes == [1, 2]
    assert status == other_status and len(one["rows"]) == len(two["rows"]) > 0
    for expected, found in zip(one["rows"], two["rows"], strict=True):
        numbers = {name: value for name, value in expected.items() if isinstance(value, float)}
        assert {name: found[name] for name in numbers} == pytest.approx(numbers, rel=1e-3, abs=1e-8)
        assert {name: found[name] for name in found if name not in numbers} == {
            name: value for name, value in expected.items() if name not in numbers
        }


def test_a_number_of_ranks_that_the_model_cannot_have_is_refused(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size, message in ((0, "tensor_parallel_size=0"), (4096, "tensor_parallel_size=4096: ")):
        with pytest.raises(SystemExit) as ended:
            check(data, tmp_path / "c.json", size)
        assert ended.value.code == BAD_INPUT and message in capsys.readouterr().err
