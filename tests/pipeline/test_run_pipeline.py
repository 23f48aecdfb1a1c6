"""All stages in one process: which settings reach which stage, and what is refused before the first one begins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.stages import ROOT
from vllm_blend.pipeline import run_pipeline as module
from vllm_blend.pipeline.config import DecodeConfig, PrefillConfig, RetrievalConfig, load_config


def test_settings_are_read_as_yaml() -> None:
    changed = module.apply_settings(load_config(), ["decode.blend_recompute_ratio=0.3", "decode.passages=retrieved"])
    assert changed["decode"]["blend_recompute_ratio"] == 0.3 and changed["decode"]["passages"] == "retrieved"
    assert load_config()["decode"]["passages"] == "all"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("decode.x", "write section.key=value"),
        ("x=1", "write section.key=value"),
        ("bake.time=1", "a section of retrieval, prefill, decode"),
        ("decode.passages={", "not a YAML value"),
        ("decode.passges=all", "did you mean 'passages'"),
        ("decode.passages=some", "use one of 'retrieved', 'all'"),
        ("decode.max_samples=few", "must be a whole number, not str"),
    ],
)
def test_mistakes_end_the_command_with_a_message(
    assignment: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        module.main(["--config", str(ROOT / "configs/musique.yaml"), "--set", assignment])
    assert ended.value.code == 1 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["target_compression_rate=0.5", "max_cache_tokens=64"], "target_compression_rate=0.5 and max_cache_tokens=64"),
        (["max_cache_tokens=10"], "max_cache_tokens=10 is below"),
        (["kvc_metric=guess"], "kvc_metric='guess' is unknown"),
        (["draft_tokens=4"], "enable_kvc and draft_tokens=4 exclude each other"),
        (["pages=true"], "prefill.pages=False and decode.pages=True: give both the same"),
    ],
)
def test_what_the_last_stage_would_refuse_stops_the_first(
    assignments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "run_retrieval", lambda _: pytest.fail("a stage has begun"))
    evicting = ["enable_kvc=true", "offload_mode=none", *assignments]
    flags = [part for assignment in evicting for part in ("--set", f"decode.{assignment}")]
    with pytest.raises(SystemExit) as ended:
        module.main(["--config", str(ROOT / "configs/musique.yaml"), *flags])
    assert ended.value.code == 1 and message in capsys.readouterr().err


def test_flags_reach_every_stage(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def record(*sections: Any) -> None:
        seen.extend(sections)
        sys.exit(0)

    monkeypatch.setattr(module, "run_pipeline", record)
    flags = ["--dataset", "inputs/wikimqa_s.json", "--model-id", "m", "--top-k", "7", "--max-samples", "9"]
    with pytest.raises(SystemExit):
        module.main(["--config", str(ROOT / "configs/musique.yaml"), *flags, "--results-dir", str(tmp_path)])
    retrieval, prefill, decode = seen
    assert (retrieval.dataset_name, retrieval.top_k, prefill.top_k_gpu) == ("wikimqa_s", 7, 7)
    assert retrieval.max_samples == prefill.max_samples == decode.max_samples == 9
    assert prefill.model_id == decode.model_id == "m" and retrieval.model_id != "m"
    assert retrieval.output_path == tmp_path / "retrieval/wikimqa_s_rag_both_k7.json"
    assert prefill.output_dir == decode.load_cache_dir == str(tmp_path / "kv_caches")


def test_a_missing_matplotlib_is_named_before_any_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it raises ImportError
    retrieval = RetrievalConfig(output_dir=str(tmp_path / "retrieval"))
    with pytest.raises(ImportError, match=r"needs matplotlib.*extra `bench`.*leave --timeline out"):
        module.run_pipeline(retrieval, PrefillConfig(), DecodeConfig(timeline=True))
    assert list(tmp_path.iterdir()) == []
