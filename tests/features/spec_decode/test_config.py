from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

from tests.engine.engines import DEMO
from tests.features.spec_decode.engines import real_drafters
from vllm_blend import LLM, EngineArgs
from vllm_blend.config import EngineConfig
from vllm_blend.features.spec_decode.config import SpeculativeConfig
from vllm_blend.features.spec_decode.length import DraftLength


def config(**arguments: Any) -> EngineConfig:
    return EngineArgs("m", **arguments).create_engine_config()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "medusa"}, r"method='medusa' is unknown: use one of \[.*'ngram'.*'suffix'"),
        ({"num_speculative_tokens": 3}, "no method: give one"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "num_speculative_tokens=-1 must be a positive number"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens=0 must be a positive number"),
        ({"method": "ngram", "num_speculative_tokens": True}, "num_speculative_tokens=True must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": None}, "num_speculative_tokens=None must be a whole number"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "num_speculative_tokens=65 is above 64"),
        ({"method": "ngram", "prompt_lookup_max": -2}, "prompt_lookup_max=-2 must be a positive number"),
        ({"method": "ngram", "prompt_lookup_min": 1.5}, "prompt_lookup_min=1.5 must be a whole number"),
        ({"method": "ngram", "prompt_lookup_min": 4}, "prompt_lookup_min=4 and prompt_lookup_max=3"),
        ({"method": "suffix", "prompt_lookup_max": 4}, "prompt_lookup_max is not a setting of method='suffix'"),
        ({"method": "ngram", "draft_length": 4}, "no option 'draft_length': use method, num_speculative_tokens"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(speculative_config=options)


def test_what_is_no_dict_is_refused() -> None:
    with pytest.raises(ValueError, match="speculative_config='ngram' must be a dict"):
        config(speculative_config="ngram")


def test_a_bad_option_fails_before_anything_is_loaded() -> None:
    with pytest.raises(ValueError, match="'medusa' is unknown"):
        LLM("no such model", speculative_config={"method": "medusa"})


def test_an_engine_that_speculates_runs_ahead_where_others_do() -> None:
    gpu = torch.device("cuda")
    assert config(speculative_config={"method": "ngram"}).scheduler.runs_ahead(gpu)
    assert not config(speculative_config={"method": "ngram"}, async_scheduling=False).scheduler.runs_ahead(gpu)


@pytest.mark.parametrize("method", real_drafters())
def test_vllms_names_make_the_drafter(method: str) -> None:
    made = config(speculative_config={"method": method, "num_speculative_tokens": 3}).feature(SpeculativeConfig)
    assert made == SpeculativeConfig(method, 3)
    assert made.make_drafter().name == method


def test_the_rows_of_a_step_are_bounded() -> None:
    made = SpeculativeConfig("ngram", 8)
    assert made.most_rows(4) == 4 * 9
    assert made.most_rows(256) == 256 + 100 * 8
    assert DraftLength(8, hits=1.0, trials=1.0).next(num_sequences=100) == 0


def test_options_reach_the_drafter() -> None:
    options = {"method": "ngram", "prompt_lookup_max": 6, "prompt_lookup_min": 2}
    drafter: Any = SpeculativeConfig.from_dict(options).make_drafter()
    assert (drafter.prompt_lookup_max, drafter.prompt_lookup_min) == (6, 2)


def test_the_command_line_takes_json(capsys: pytest.CaptureFixture[str]) -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    given = parser.parse_args(["--model", DEMO, "--speculative-config", '{"method": "suffix"}'])
    assert EngineArgs.from_cli_args(given).speculative_config == {"method": "suffix"}
    for text, message in (("{method: suffix}", "is not JSON"), ("[1]", "is not a JSON object")):
        with pytest.raises(SystemExit):
            parser.parse_args(["--model", DEMO, "--speculative-config", text])
        assert message in capsys.readouterr().err
