"""Arguments of vLLM that the engine does not have: at vLLM's defaults they are accepted, otherwise refused by name.

`vllm_engine_args.json` has every field of `EngineArgs` in vLLM 0.11.2 and 0.22.1 with its defaults there, read from
their sources; a config object with its own defaults is written as {}.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from vllm_blend import LLM, EngineArgs
from vllm_blend.unsupported.engine_args import UNSUPPORTED_ENGINE_ARGS

VLLM_DEFAULTS: dict[str, list[Any]] = json.loads(Path(__file__).with_name("vllm_engine_args.json").read_text())
OWN = {field.name for field in fields(EngineArgs)}
# Arguments of LLM only, and of releases before 0.11 that scripts still give.
NOT_IN_ENGINE_ARGS = {
    *("chat_template", "rope_scaling", "rope_theta", "max_seq_len_to_capture", "num_scheduler_steps"),
    *("disable_async_output_proc", "use_v2_block_manager"),
}


def engine_args(**arguments: Any) -> EngineArgs:
    return EngineArgs("m", **arguments)


def test_vllms_defaults_and_none_are_accepted() -> None:
    plain = EngineArgs("m").create_engine_config()
    for name, defaults in VLLM_DEFAULTS.items():
        for value in defaults if name in OWN else [None, *defaults]:
            config = engine_args(**{name: value}).create_engine_config()
            assert name in OWN or config == plain, name
    assert engine_args(logits_processors=[]).create_engine_config() == plain
    assert engine_args(max_num_seqs=None, block_size=None, enable_prefix_caching=None, seed=None) == EngineArgs("m")


def test_the_table_has_what_vllm_has_and_the_engine_does_not() -> None:
    assert UNSUPPORTED_ENGINE_ARGS.keys() == VLLM_DEFAULTS.keys() - OWN | NOT_IN_ENGINE_ARGS
    for name in UNSUPPORTED_ENGINE_ARGS.keys() - NOT_IN_ENGINE_ARGS:
        default = UNSUPPORTED_ENGINE_ARGS[name].default
        assert (list(default) if isinstance(default, set) else default) in VLLM_DEFAULTS[name]


def test_other_values_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    for name, argument in UNSUPPORTED_ENGINE_ARGS.items():
        if argument.ignored:
            continue
        with pytest.raises(ValueError) as refusal:
            engine_args(**{name: "something else"})
        assert str(refusal.value) == f"{name}='something else' is not supported: {argument.reason}"
        assert len(argument.reason) > 10 and not argument.reason.endswith(".")
    with pytest.raises(ValueError, match="enable_lora=True is not supported: merge the LoRA adapter"):
        LLM(model="no-such-model", enable_lora=True)
    assert not caplog.messages
    assert engine_args(swap_space=1) == EngineArgs("m")
    assert caplog.messages == ["swap_space=1 is ignored: preempted requests are computed again, so nothing is swapped"]


def test_a_name_that_is_unknown_to_both_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unknown engine argument 'max_modellen': did you mean 'max_model_len'"):
        engine_args(max_modellen=8)
    with pytest.raises(TypeError, match="unknown engine argument 'swap_spaces': did you mean 'swap_space'"):
        LLM(model="no-such-model", swap_spaces=1)
    with pytest.raises(TypeError, match=r"unknown engine argument 'qqq'$"):
        engine_args(qqq=1)
