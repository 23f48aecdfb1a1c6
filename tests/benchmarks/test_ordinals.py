"""The study of ordinal variants: its fillers, its count of variants, and the command by two processes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.quality.small import MODEL, ROOT, write_small
from vllm_blend.blend.encoding_contexts import ENCODING_CONTEXTS, make_encoding_context
from vllm_blend.pipeline.files import read_json

pytestmark = pytest.mark.cpu_only

SCRIPT = ROOT / "benchmarks" / "ordinals.py"


@pytest.fixture
def ordinals() -> Iterator[Any]:
    """The script as a module of its own; what it registers is removed again."""
    known = dict(ENCODING_CONTEXTS)
    spec = importlib.util.spec_from_file_location("ordinals_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ENCODING_CONTEXTS.keys() - known.keys():
        del ENCODING_CONTEXTS[name]


def test_fillers(ordinals: Any) -> None:
    def texts(kind: Any) -> list[str]:
        rng = Random(0)
        return [kind(list).text(number, rng) for number in range(20)]

    plain = texts(ordinals.Filler)
    short, two = texts(ordinals.OneSentence), texts(ordinals.TwoJoined)
    assert all(
        text.startswith(one.removesuffix(".")) and one.endswith(".") for text, one in zip(plain, short, strict=True)
    )
    assert all(one.count(".") == 1 for one in short) and all(text.count(".") >= 4 for text in two)
    assert all("was born in" in text for text in texts(ordinals.OneKind)) and len(set(texts(ordinals.OneKind))) == 20
    shuffled = texts(ordinals.Shuffled)
    assert sorted(shuffled[0].split()) == sorted(plain[0].split()) and shuffled[0] != plain[0]
    same = ordinals.SameForAll(lambda text: list(text.encode()))
    assert same.passages(3, 1) == same.passages(3, 2) and len(set(same.passages(3, 1))) == 3


def test_every_filler_is_used_by_its_setting(ordinals: Any) -> None:
    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return list(text.encode())

    for name, kind in ordinals.FILLERS.items():
        context = make_encoding_context(name, Tokenizer())  # type: ignore[arg-type]
        assert type(context.filler) is kind and context.ordinals == ordinals.ORDINALS  # type: ignore[attr-defined]


def test_variants_are_those_that_prompts_come_to_need(ordinals: Any) -> None:
    counts = {setting.name: ordinals.num_variants(setting, 12) for setting in ordinals.SETTINGS}
    assert counts["prefix"] == counts["5"] == 1 and counts["0, 8"] == 2 and counts["0, 4, 9"] == 3
    assert counts["0, 2, 5, 9, 14"] == 4  # none stands as near to 14 as to 9
    assert counts["words shuffled"] == len({0, 1, 2, 3, 4, 6, 8, 11})


def test_the_command_writes_json_and_tables(tmp_path: Path) -> None:
    """Two processes share the work, and have to know the fillers of the script too."""
    flags = ["--model", MODEL, "--datasets", str(write_small(tmp_path, 2)), "--workers", "2", "--device", "cpu"]
    flags += ["--settings", "5", "words shuffled", "--output", str(tmp_path / "o")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ordinals", *flags], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    written = read_json(tmp_path / "o.json", "rows")
    rows = {(row["setting"], row["ratio"]): row for row in written["rows"]}
    settings = [
        ("full prefill", None),
        *((name, r) for name in ("prefix", "5", "words shuffled") for r in (0, 0.08, 0.15)),
    ]
    assert list(rows) == settings and written["about"]["workers"] == 2
    assert rows["prefix", 0]["encoding"] == 1 and rows["5", 0.15]["encoding"] == rows["5", 0]["encoding"] > 3
    assert rows["5", 0]["variants"] == 1 and rows["words shuffled", 0]["variants"] == 4  # places
    assert rows["prefix", 0.08]["f1_over_prefix"] == 0
    table = (tmp_path / "o.md").read_text()
    assert table in done.stdout and "| as many passages, words shuffled | 4 |" in table


def test_an_unknown_setting_is_named(ordinals: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        ordinals.main(["--datasets", str(write_small(tmp_path, 1)), "--settings", "7"])
    assert ended.value.code == 1 and "'7' is unknown: there are 5, 0, 8" in capsys.readouterr().err
