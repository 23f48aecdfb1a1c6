"""Sizes in config.json that no model has: the error names the field and what to do, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from vllm_blend import LLM
from vllm_blend.models.config_sizes import SIZES, check_config_sizes
from vllm_blend.models.loader import load_hf_config

MODEL = ROOT / "inputs" / "demo-model-reuse"  # with 6 heads, 2 KV heads, and a hidden size of 384
POSITIVE = "it must be a positive integer; correct it, or fetch the file again"
DIVIDES = "the first must be a multiple of the second; correct it, or fetch the file again"


def write_config(folder: Path, changes: dict[str, Any]) -> str:
    config = json.loads((MODEL / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_positive(tmp_path: Path, name: str, value: int) -> None:
    folder = write_config(tmp_path, {name: value})
    with pytest.raises(ValueError) as raised:
        load_hf_config(folder)
    assert f"{folder!r} has {name}={value}: {POSITIVE}" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 4}, f"num_attention_heads=6 and num_key_value_heads=4: {DIVIDES}"),
        ({"num_key_value_heads": 12}, f"num_attention_heads=6 and num_key_value_heads=12: {DIVIDES}"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "hidden size (384) is not a multiple"),  # transformers'
        (
            {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None},
            f"hidden_size=384 and num_attention_heads=7: {DIVIDES}",
        ),
        ({"num_attention_heads": "6"}, "num_attention_heads"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps=-1e-05: it must be a finite number of at least 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: it must be a finite number of at least 0"),
    ],
)
def test_sizes_fit_one_another(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        load_hf_config(write_config(tmp_path, changes))
    assert message in str(raised.value)


def test_sizes_that_may_be_left_out(tmp_path: Path) -> None:
    config = load_hf_config(write_config(tmp_path, {"num_key_value_heads": None, "head_dim": None}))
    assert (config.num_key_value_heads, config.head_dim) == (6, 64)


def test_the_text_part_is_looked_at() -> None:
    check_config_sizes({"hidden_size": 0, "text_config": {"hidden_size": 8}}, "config.json")
    with pytest.raises(ValueError, match=r"^config\.json has head_dim=0: it must be"):
        check_config_sizes({"hidden_size": 8, "text_config": {"head_dim": 0}}, "config.json")


def test_overrides_are_checked_and_may_repair(tmp_path: Path) -> None:
    def without_heads(config: Any) -> Any:
        config.num_attention_heads = 0
        return config

    for overrides in ({"num_attention_heads": 0}, {"head_dim": 0}, without_heads):
        with pytest.raises(ValueError, match=f"=0: {POSITIVE}"):
            load_hf_config(str(MODEL), hf_overrides=overrides)
    folder = write_config(tmp_path, {"num_key_value_heads": 4})
    assert load_hf_config(folder, hf_overrides={"num_key_value_heads": 2}).num_key_value_heads == 2


def test_an_engine_says_it_before_it_loads(tmp_path: Path) -> None:
    folder = write_config(tmp_path, {"num_attention_heads": 0})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path)
    with pytest.raises(ValueError, match=f"num_attention_heads=0: {POSITIVE}"):  # there are no weights
        LLM(folder, device="cpu")
