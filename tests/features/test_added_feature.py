"""A feature is added by its own folder (here `hook_log`) and one line in the list of features."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import pytest

from tests.engine.engines import feature, greedy, tiny_model
from tests.features.hook_log.config import HookLogConfig
from tests.features.hook_log.extension import REFUSED, HookLog
from tests.features.hook_log.passes import HookLogPasses
from vllm_blend import features
from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine_args import EngineArgs
from vllm_blend.engine_args import __file__ as ENGINE_ARGS

TINY = tiny_model("llama")


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the engine's arguments, as it is with one feature more in the list."""
    monkeypatch.setattr(features, "FEATURES", (*features.FEATURES, HookLogConfig))
    spec = spec_from_file_location("engine_args_with_another_feature", ENGINE_ARGS)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_options_are_arguments(arguments: ModuleType) -> None:
    config = arguments.EngineArgs(model=TINY, log_hooks=True).create_engine_config()
    assert config.feature(HookLogConfig).is_on
    assert not arguments.EngineArgs(model=TINY).create_engine_config().feature(HookLogConfig).is_on
    with pytest.raises(ValueError, match="log_hooks"):
        arguments.EngineArgs(model=TINY, log_hooks="no")
    parser = arguments.EngineArgs.add_cli_args(ArgumentParser())
    assert arguments.EngineArgs.from_cli_args(parser.parse_args(["--model", TINY, "--log-hooks"])).log_hooks


def test_the_step_loop_and_the_worker_call_its_hooks() -> None:
    arguments = {"max_model_len": 64, "num_gpu_blocks_override": 8, "async_scheduling": True, "enforce_eager": True}
    config = EngineArgs(TINY, **arguments).create_engine_config()
    engine = LLMEngine(replace(config, features=(*config.features, HookLogConfig(log_hooks=True))))
    log = feature(engine, HookLog)
    with pytest.raises(ValueError, match="unlucky"):
        engine.add_request("refused", {"prompt_token_ids": [5, REFUSED]}, greedy(2))
    assert not engine.has_unfinished_requests()
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, greedy(2, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()
    step = ["before_schedule", "launched", "may_run_ahead", "verify 1"]
    assert log.calls == ["check", "check", "begin", *step, *step, "released [3, 1]", "idle"]
    assert {metric.name: metric.value for metric in engine.get_metrics()}["test:hooks_called"] == len(log.calls)
    worker = engine.model_executor.driver_worker
    [passes] = [one for one in worker.extensions if isinstance(one, HookLogPasses)]
    assert passes.log.layers == [*range(worker.num_layers)] * 2
    engine.shutdown()


def test_an_engine_without_it_has_none() -> None:
    config = EngineArgs(TINY, max_model_len=64, num_gpu_blocks_override=8).create_engine_config()
    engine = LLMEngine(replace(config, features=(*config.features, HookLogConfig())))
    assert engine.extension(HookLog) is None
    assert not any(isinstance(one, HookLogPasses) for one in engine.model_executor.driver_worker.extensions)
    engine.shutdown()


RAISES = [(hook, n) for hook in ("before_schedule", "may_run_ahead", "launched", "verify", "released") for n in (1, 3)]


class Failure(Exception):
    """Raised by a hook in these tests."""


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(("hook", "call"), [*RAISES, ("idle", 1)])
def test_a_hook_that_raises_costs_no_request_its_answer(
    hook: str, call: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HookLog, "may_run_ahead", lambda *_: ahead)
    failing = _failing(getattr(HookLog, hook), call)
    monkeypatch.setattr(HookLog, hook, failing)
    engine = _engine()
    free = engine.blocks.num_free_blocks
    answers, again = _answers(engine), _answers(engine)
    assert answers == again and all(len(answer) == 3 for answer in answers.values())
    assert engine.get_num_unfinished_requests() == 0 and engine.blocks.num_free_blocks == free
    engine.shutdown()


def test_a_request_whose_beginning_fails_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookLog, "begin", _failing(HookLog.begin, 1))
    engine = _engine()
    with pytest.raises(Failure):
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, greedy(3))
    assert engine.get_num_unfinished_requests() == 0 and not engine.has_request("a")
    assert len(_answers(engine)["a"]) == 3
    engine.shutdown()


def _failing(hook: Callable[..., Any], call: int) -> Callable[..., Any]:
    """Return a hook that raises when it is called for the `call`-th time, and is `hook` otherwise."""
    calls = 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Failure
        return hook(*arguments)

    return failing


def _engine() -> LLMEngine:
    arguments = {"max_model_len": 64, "num_gpu_blocks_override": 12, "async_scheduling": True, "enforce_eager": True}
    config = EngineArgs(TINY, **arguments).create_engine_config()
    return LLMEngine(replace(config, features=(*config.features, HookLogConfig(log_hooks=True))))


def _answers(engine: LLMEngine) -> dict[str, list[int]]:
    """Return the answers to three prompts, whatever the engine's steps raise."""
    for index, name in enumerate("abc"):
        engine.add_request(name, [5 + index, 6, 7], greedy(3, ignore_eos=True), final_only=True)
    answers: dict[str, list[int]] = {}
    for _ in range(30):
        with suppress(Failure):
            answers |= {output.request_id: list(output.outputs[0].token_ids) for output in engine.step()}
        if not engine.has_unfinished_requests():
            break
    return answers
