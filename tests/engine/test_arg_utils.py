from __future__ import annotations

import argparse
from dataclasses import fields

import pytest

from vllm_blend import EngineArgs


def parse(*flags: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.add_argument("--other", type=int)
    return EngineArgs.from_cli_args(parser.parse_args(flags))


def test_without_flags_the_defaults_hold() -> None:
    assert parse("--model", "m") == EngineArgs("m")


def test_every_argument_is_a_flag_in_vllms_spelling() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    known = {option for action in parser._actions for option in action.option_strings}
    assert {"--" + field.name.replace("_", "-") for field in fields(EngineArgs)} <= known


def test_flags_of_every_kind() -> None:
    given = parse(
        *("--model", "m", "--attention-backend", "torch_native", "--max-model-len", "512", "--other", "3"),
        *("--enforce-eager", "--no-enable-prefix-caching", "--gpu-memory-utilization", "0.5", "--load-format", "dummy"),
        *("--blend-check-layers", "1", "2", "--blend-recompute-ratios", "0.3", "0.1", "--dtype", "bfloat16"),
    )
    assert given == EngineArgs(
        "m",
        attention_backend="torch_native",
        max_model_len=512,
        enforce_eager=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.5,
        load_format="dummy",
        blend_check_layers=[1, 2],
        blend_recompute_ratios=[0.3, 0.1],
        dtype="bfloat16",
    )
    assert given.create_engine_config().attention_backend == "torch_native"


@pytest.mark.parametrize("flags", [[], ["--model", "m", "--load-format", "sideways"], ["--model", "m", "--seed", "x"]])
def test_what_cannot_be_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*flags)
    assert "--model" in capsys.readouterr().err


def test_help_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    assert "--attention-backend" in capsys.readouterr().out
