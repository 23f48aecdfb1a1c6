from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from functools import reduce
from operator import or_
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from transformers import PretrainedConfig

from vllm_blend import BlendConfig, EngineArgs
from vllm_blend.config import ChunkDevice, ExecutorBackend, KVCacheDtype, LoadFormat, SchedulingPolicy
from vllm_blend.engine_args import OPTION_GROUPS, OPTIONS
from vllm_blend.features.kv_compress.config import Aggregation, AllocationChoice, KVCompressConfig
from vllm_blend.features.kv_events.config import KVEventsConfig
from vllm_blend.features.offload.config import OffloadMode
from vllm_blend.features.spec_decode.config import SpeculativeConfig
from vllm_blend.features.structured.config import StructuredOutputsConfig
from vllm_blend.kv_store.options import ChunkFormat
from vllm_blend.options import OptionGroup


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


# By the declared type: values of other types, and some of its own. Whether None fits follows from "| None".
OF_TYPE: dict[Any, tuple[list[Any], list[Any]]] = {
    bool: (["no", "true", 0, 1, 0.0, []], [True, False]),
    int: ([True, "16", 2.5, 16.0, float("nan"), [16]], [16, np.int64(16)]),
    float: ([True, "0.5", float("nan"), float("inf"), [0.5]], [0.5, 1, np.float32(0.5)]),
    str: ([1, True, 0.5, ["a"], b"a"], ["a"]),
    str | torch.dtype: ([1, True, torch.device("cpu")], ["auto", torch.float32]),
    str | torch.device: ([1, True, torch.float32], ["cpu", torch.device("cpu")]),
    list[int]: (["12", 1, [1.5], [True], [None], {1: 2}], [[1, 2], (1,), [np.int32(3)]]),
    list[float]: (["0.5", 0.5, ["0.5"], [True]], [[0.5, 1], (0.5,)]),
    dict[str, Any]: (["{}", [], [("a", 1)], {1: 2}], [{"a": 1}, {}]),
    dict[str, Any] | Callable[[PretrainedConfig], PretrainedConfig]: (["{}", 1, {1: 2}], [{"a": {"b": 1}}, str]),
    dict[str, Any] | KVEventsConfig: (["{}", [], True, {1: 2}], [{"topic": "a"}, KVEventsConfig(), {}]),
    LoadFormat: ([1, "sideways", True, ["auto"]], ["auto", "dummy"]),
    ChunkDevice: (["tpu", 0], ["cpu"]),
    ChunkFormat: (["int4", 8], ["fp8"]),
    KVCacheDtype: (["fp8_e5m2", 8, "int8"], ["fp8_e4m3", "fp8", "auto"]),
    OffloadMode: (["no", False], ["exact"]),
    Aggregation: (["L3", 2], ["L1-avg"]),
    AllocationChoice: (["row", 1], ["head"]),
    SchedulingPolicy: (["lifo", 1], ["priority"]),
    ExecutorBackend: (["external_launcher", 2], ["mp"]),
}
OPTIONAL_IN_VLLM = {
    "attention_backend",
    "block_size",
    "enable_prefix_caching",
    "kv_cache_dtype",
    "max_num_seqs",
    "seed",
}


def without_none(declared: Any) -> Any:
    """The declared type without "| None"."""
    if get_origin(declared) not in (Union, UnionType):
        return declared
    return reduce(or_, [kind for kind in get_args(declared) if kind is not NoneType])


@pytest.mark.parametrize("name", [field.name for field in fields(EngineArgs)])
def test_every_option_is_checked_by_its_type(name: str) -> None:
    declared = OPTIONS[name].type
    plain = without_none(declared)
    wrong, right = OF_TYPE[plain]
    none_fits = plain != declared or name in {*OPTIONAL_IN_VLLM, "blend_check_layers"}
    for value in [*wrong, *([] if none_fits else [None])]:
        with pytest.raises(
            ValueError, match=rf"^{name}=.* (is unknown: use one of .*|must be .*, not {type(value).__name__})$"
        ):
            EngineArgs(**({"model": "m"} | {name: value}))
    for value in right:
        assert getattr(EngineArgs(**({"model": "m"} | {name: value})), name) == value
    if none_fits:
        assert getattr(EngineArgs("m", **{name: None}), name) == OPTIONS[name].default


def test_options_are_the_fields_and_the_flags_have_the_headings_of_their_groups() -> None:
    assert [field.name for field in fields(EngineArgs)] == [*OPTIONS]
    assert all(option.help for option in OPTIONS.values())
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    sections = {section.title: section for section in parser._action_groups}
    for group in OPTION_GROUPS:
        listed = [action.dest for action in sections[group.title]._group_actions]
        assert listed == [option.name for option in group.options()]


def test_every_value_arrives_in_the_configuration() -> None:
    given = {name: OF_TYPE[without_none(option.type)][1][-1] for name, option in OPTIONS.items()}
    given |= {"blend_recompute_ratio": None, "blend_check_layers": [2], "blend_recompute_ratios": [0.5]}
    given |= {"enable_kvc": True, "max_cache_tokens": 77, "target_compression_rate": None, "num_sinks": 3}
    given |= {"offload_mode": None, "speculative_config": None, "cascade_attention": False, "enable_blending": True}
    given |= {"block_size": 8, "tensor_parallel_size": 1, "quantization": "fp8", "override_generation_config": {}}
    given |= {"kvc_metric": "kv_compress", "max_num_batched_tokens": 99}
    config = EngineArgs(**given).create_engine_config()
    groups = [config, config.model, config.cache, config.scheduler, config.blend, config.chunk_store, *config.features]
    groups.append(config.feature(KVCompressConfig).settings)
    assert {type(group) for group in groups} == {*OPTION_GROUPS}
    for group in groups:
        if isinstance(
            group, (SpeculativeConfig, StructuredOutputsConfig, KVEventsConfig)
        ):  # one option has all of its fields
            continue
        for field, option in zip(own_options(group), type(group).options(), strict=True):
            assert getattr(group, field) == given[option.name], option.name


def own_options(group: OptionGroup) -> list[str]:
    """The fields of a group that are options, in order."""
    return [field.name for field in fields(group) if field.metadata]


def test_paths_count_as_text_and_configs_made_by_hand_are_checked_too() -> None:
    assert EngineArgs(Path("folder"), chunk_store_path=Path("store")).chunk_store_path == "store"  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"BlendConfig\.enable_blending='no' must be True or False, not str"):
        BlendConfig(enable_blending="no")  # type: ignore[arg-type]
    changed = EngineArgs("m")
    changed.enforce_eager = "no"
    with pytest.raises(ValueError, match=r"ModelConfig\.enforce_eager='no'"):
        changed.create_engine_config()
