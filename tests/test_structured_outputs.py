from __future__ import annotations

from typing import Any

import pytest

from vllm_blend import SamplingParams
from vllm_blend.structured_outputs import GuidedDecodingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "says nothing of the form: give one of json, regex"),
        ({"json_object": False}, "says nothing of the form"),
        ({"regex": "a", "choice": ["b"]}, "has regex and choice: give exactly one"),
        ({"json": 3}, "structured_outputs.json must be a dict, or JSON text, not int"),
        ({"regex": 3}, "structured_outputs.regex must be a string"),
        ({"grammar": b"x"}, "structured_outputs.grammar must be a string"),
        ({"choice": "yes"}, "structured_outputs.choice must be a list of strings, not str"),
        ({"choice": ["yes", 3]}, r"structured_outputs.choice\[1\] must be a string, not int"),
        ({"choice": []}, "structured_outputs.choice is empty"),
        ({"json_object": "yes"}, "structured_outputs.json_object must be True or False"),
        ({"regex": "a", "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "give one of them"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        StructuredOutputsParams(**given)


def test_parameters_take_either_name_and_dicts() -> None:
    form = StructuredOutputsParams(json={"type": "null"}, disable_any_whitespace=True)
    fields: dict[str, Any] = {"json": {"type": "null"}, "disable_any_whitespace": True}
    given: list[dict[str, Any]] = [
        {"structured_outputs": form},
        {"structured_outputs": fields},
        {"guided_decoding": GuidedDecodingParams(**fields, backend="guidance")},
        {"guided_decoding": fields},
    ]
    for one in given:
        params = SamplingParams(**one)
        assert params.structured_outputs == form and type(params.structured_outputs) is StructuredOutputsParams
        assert params.guided_decoding is None and params.clone().structured_outputs == form
    assert form.form == "json" and StructuredOutputsParams(choice=("a",)).choice == ["a"]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"structured_outputs": "json"}, "structured_outputs is a str: give StructuredOutputsParams"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs has no field 'jsn'"),
        ({"structured_outputs": {"regex": "a"}, "guided_decoding": {"regex": "a"}}, "both given"),
        ({"guided_decoding": {"regex": "a", "backend": "xgrammar"}}, "backend='xgrammar' does not exist here"),
    ],
)
def test_bad_parameters_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        SamplingParams(**given)
