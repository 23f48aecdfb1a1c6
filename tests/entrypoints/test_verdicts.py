"""Verdicts: where they are kept, what they are about, and what a server says of them before it loads the model."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import ROOT
from vllm_blend.config import EngineConfig
from vllm_blend.engine_args import EngineArgs
from vllm_blend.entrypoints import verdicts
from vllm_blend.entrypoints.openai.run import run_server
from vllm_blend.entrypoints.serve import main, parse
from vllm_blend.entrypoints.verdicts import FILE, announce, identity, keep_verdict, places, read_verdict, writable_place

pytestmark = pytest.mark.cpu_only

DEMO = ROOT / "inputs" / "demo-model"
SERVED = {"rule": "question_attention", "ratio": 0.15, "company": "filler"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "model"))


def config(model: Path, **arguments: Any) -> EngineConfig:
    return EngineArgs(model=str(model), enable_blending=True, **arguments).create_engine_config()


def verdict(state: str = "passes", **setting: Any) -> dict[str, Any]:
    return {"state": state, "text": f"it {state}", "settings": [SERVED | setting | {"state": state}]}


def test_a_verdict_is_about_weights_and_dtype(model: Path, tmp_path: Path) -> None:
    name = identity(config(model))
    moved = Path(shutil.copytree(model, tmp_path / "moved"))
    assert identity(config(moved)) == name and name.endswith(", float32")
    assert identity(config(model, dtype="bfloat16")) == name.replace("float32", "bfloat16")
    others = [
        identity(config(model, kv_cache_dtype="fp8")),
        identity(config(model, hf_overrides={"rms_norm_eps": 1.0})),
    ]
    with (moved / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\0")
    others.append(identity(config(moved)))
    assert len({name, *others}) == 4


def test_the_chunk_stores_folder_goes_before_the_models(model: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    both = config(model, chunk_store_path=str(store))
    assert places(both) == [store / FILE, model / FILE] and writable_place(both) == store / FILE
    assert places(config(Path("org/name"))) == [] and writable_place(config(Path("org/name"))) is None
    gguf = tmp_path / "small.GGUF"
    assert places(config(gguf)) == [tmp_path / f"small.GGUF.{FILE}"]
    name = identity(both)
    keep_verdict(model / FILE, name, verdict("fails"))
    keep_verdict(model / FILE, "another", verdict())
    kept = read_verdict(both)
    assert kept is not None and (kept.path, kept.state) == (model / FILE, "fails")
    keep_verdict(store / FILE, name, verdict())
    kept = read_verdict(both)
    assert kept is not None and (kept.path, kept.state, kept.text) == (store / FILE, "passes", "it passes")
    assert read_verdict(config(model, dtype="bfloat16")) is None
    assert identity(both) == name  # a verdict in the model's folder makes no other model of it


def test_a_rule_is_known_by_any_of_its_names(model: Path) -> None:
    keep_verdict(model / FILE, identity(config(model)), verdict(rule="auto"))
    kept = read_verdict(config(model))
    assert kept is not None and kept.state_of("question_attention", 0.15, "filler") == "passes"
    assert kept.state_of("auto", 0.2, "filler") is kept.state_of("random", 0.15, "filler") is None


def test_a_rule_that_is_gone_was_not_measured(model: Path) -> None:
    keep_verdict(model / FILE, identity(config(model)), verdict(rule="late_attention+mean_shift"))
    kept = read_verdict(config(model))
    assert kept is not None and kept.state_of("auto", 0.15, "filler") is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[",
        "[]",
        '{"verdicts": []}',
        '{"verdicts": {"a": {"state": 1}}}',
        '{"verdicts": {"a": {"state": "passes", "text": "", "settings": [{}]}}}',
    ],
)
def test_a_file_of_something_else_counts_as_none(model: Path, caplog: pytest.LogCaptureFixture, content: str) -> None:
    (model / FILE).write_text(content)
    assert read_verdict(config(model)) is None
    assert str(model / FILE) in caplog.text and "counts as no" in caplog.text
    name = identity(config(model))
    keep_verdict(model / FILE, name, verdict())
    assert list(json.loads((model / FILE).read_text())["verdicts"]) == [name]


@pytest.mark.parametrize(
    ("kept", "level", "said"),
    [
        (None, logging.INFO, "there is no verdict on blending this model"),
        (
            verdict(),
            logging.INFO,
            "it passes\nThis server blends by question_attention at 15%, after filler, which counts as 'passes'",
        ),
        (verdict("fails"), logging.WARNING, "which counts as 'fails'"),
        (verdict(ratio=0.3), logging.WARNING, "which was not measured"),
    ],
)
def test_a_server_says_what_is_known(
    model: Path, caplog: pytest.LogCaptureFixture, kept: dict[str, Any] | None, level: int, said: str
) -> None:
    if kept is not None:
        keep_verdict(model / FILE, identity(config(model)), kept)
    passes = kept == verdict()
    with caplog.at_level(logging.INFO, verdicts.__name__):
        announce(config(model), is_required=False)
    [record] = [each for each in caplog.records if each.name == verdicts.__name__]
    assert record.levelno == level and said in record.getMessage()
    if passes:
        announce(config(model), is_required=True)
        return
    with pytest.raises(
        ValueError, match=r"require_verdict: [\s\S]*run `vllm-blend check-model .* --no-enable-blending"
    ):
        announce(config(model), is_required=True)


def test_a_server_refuses_to_blend_without_a_verdict(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], restored_logging: None
) -> None:
    """Before it loads a model: there is no engine here."""

    def loads(*args: Any, **kwargs: Any) -> None:
        raise OSError("the model would be loaded now")

    monkeypatch.setattr("vllm_blend.engine.async_llm.AsyncLLM.from_engine_args", loads)
    flags = [str(model), "--port", "0", "--require-verdict"]
    assert main(flags) == 2 and "there is no verdict on blending this model" in capsys.readouterr().err
    for more in ([], ["--no-enable-blending"]):
        if not more:
            keep_verdict(model / FILE, identity(config(model)), verdict())
        with pytest.raises(OSError, match="would be loaded now"):
            run_server(*parse([*flags, *more]))
