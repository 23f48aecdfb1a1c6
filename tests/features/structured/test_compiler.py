"""What is compiled, kept and refused, and the process in which forms are tried."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import TINY_VOCABULARY, engine, feature, greedy, run, tiny_model
from tests.engine.tiny_tokenizers import byte_fallback, byte_level, slow
from vllm_blend import SamplingParams, StructuredOutputsParams
from vllm_blend.features.structured import trials
from vllm_blend.features.structured.compiler import GrammarCompiler
from vllm_blend.features.structured.config import StructuredOutputsConfig
from vllm_blend.features.structured.extension import StructuredOutputs
from vllm_blend.features.structured.grammar import grammar_text
from vllm_blend.features.structured.trial import NICENESS
from vllm_blend.features.structured.vocabulary import Vocabulary

Params = StructuredOutputsParams
EOS = (1,)
BYTES = {byte: byte_level().tokenize(chr(byte))[0] for byte in range(128)}
MODEL = tiny_model("llama", max_position_embeddings=512)
PROMPT = {"prompt_token_ids": [5, 6, 7]}


def compiler_for(tokenizer: Any = None, **settings: Any) -> GrammarCompiler:
    made = Vocabulary.from_tokenizer(tokenizer or byte_level(), TINY_VOCABULARY, EOS)
    return GrammarCompiler(StructuredOutputsConfig(**settings), lambda: made)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    """One for all tests that leave it as it is."""
    yield compiler_for(compile_seconds=120.0)


def doubling(rules: int) -> str:
    """A grammar whose rules name the next one twice: so deep that reading it overflows the stack of a thread."""
    names = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(rules))
    return f'start: r0\n{names}\nr{rules}: "a"'


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "("}, "structured_outputs.regex is refused: .*unclosed group"),
        ({"regex": "(?=a)b"}, "structured_outputs.regex is refused: .*look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"json": "{"}, "structured_outputs.json is no valid JSON"),
        ({"json": "3"}, "structured_outputs.json must be a JSON schema"),
        ({"json": {"maximum": float("nan")}}, "structured_outputs.json is no valid JSON"),
        ({"json": {"type": "nonsense"}}, "structured_outputs.json is refused: Invalid type: nonsense"),
        ({"json": {"uniqueItems": True, "type": "array"}}, "Unimplemented keys.*uniqueItems"),
        ({"json": {"type": "string", "minLength": 3, "maxLength": 2}}, "minLength .3. is greater than maxLength"),
        ({"json": False}, "must be a dict"),
        ({"json": "false"}, "structured_outputs.json is refused: "),
        ({"json": {"$ref": "#"}}, "structured_outputs.json is refused: no text has this form"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "the choices of oneOf overlap: give anyOf"),
        ({"json": {"$ref": "http://localhost/x.json"}}, "structured_outputs.json is refused: "),
        ({"json": nested(200)}, "recursion limit"),
        ({"json": nested(100_000)}, "structured_outputs.json is nested too deeply"),
        ({"grammar": ""}, "structured_outputs.grammar is refused: it cannot be read: No 'root' rule"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"grammar": "root ::= ("}, "structured_outputs.grammar is refused: it cannot be read"),
        ({"grammar": "root ::= " + 3000 * "("}, "it is nested too deeply"),
        ({"grammar": doubling(4000)}, "structured_outputs.grammar is refused: it is too large or too complex"),
        ({"choice": ["\ud800"]}, r"structured_outputs.choice\[0\] has half of a character"),
        ({"whitespace_pattern": "(", "json": "{}"}, "structured_outputs.json is refused: "),
        ({"structural_tag": {"structures": []}}, "structured_outputs.structural_tag lacks structures"),
        ({"structural_tag": {"structures": [{}] * 1025, "triggers": ["<"]}}, "has 1025 structures: give at most 1024"),
        ({"structural_tag": {"structures": [{}], "triggers": ["<"] * 1025}}, "has 1025 triggers: give at most 1024"),
        ({"structural_tag": {"structures": [{}], "triggers": ["<"]}}, r"structures\[0\] must have begin"),
        (
            {"structural_tag": {"structures": [{"begin": "<f>", "schema": {}, "end": ""}], "triggers": ["["]}},
            "which no trigger starts",
        ),
    ],
)
def test_a_form_that_cannot_be_is_an_error_that_names_the_field(
    given: dict[str, Any], message: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        compiler.matcher(Params(**given))
    assert len(str(raised.value)) < 600


TAGS = {"structures": [{"begin": "<f=1>", "schema": {"type": "boolean"}, "end": "</f>"}], "triggers": ["<f="]}


@pytest.mark.parametrize(
    ("given", "text", "is_whole"),
    [
        ({"structural_tag": TAGS}, "yes, <f=1>true</f> and <f=1>false</f> no", True),
        ({"structural_tag": TAGS}, "yes, <f=1>3</f>", False),
        ({"structural_tag": TAGS}, "yes, <f=2>", False),
        ({"json_object": True}, '{\n    "a": {"b": [1, null]}\n}', True),
        ({"json_object": True}, '{"a": {"b": [1, null]}', False),
        ({"json_object": True}, "[1]", False),
        ({"json_object": True}, "{" + 33 * " " + "}", False),  # so many spaces are a model that does not end
        ({"json_object": True, "disable_any_whitespace": True}, "{ }", False),
        ({"json": "true"}, "[1]", True),
        ({"json": {"properties": {"a": {}}}, "disable_additional_properties": True}, '{"b": 1}', False),
        ({"json": {"properties": {"a": {}}}}, '{"b": 1}', True),
        ({"regex": "a*"}, "", True),
        ({"choice": ["a", "ab", "abcd"]}, "a", True),
        ({"choice": ["a", "ab", "abcd"]}, "ab", True),
        ({"choice": ["a", "ab", "abcd"]}, "abc", False),
        ({"choice": ["", "ab"]}, "", True),
        ({"choice": [""]}, "", True),
        ({"choice": [f"choice {i}" for i in range(20_000)]}, "choice 19999", True),
        ({"choice": [f"choice {i}" for i in range(20_000)]}, "choice 20000", False),
        ({"regex": "a*</s>"}, "aa</s>", True),  # as text, not as the special token
    ],
)
def test_a_form_takes_these_texts_and_no_others(
    given: dict[str, Any], text: str, is_whole: bool, compiler: GrammarCompiler
) -> None:
    matcher, _ = compiler.matcher(Params(**given))
    for byte in text.encode():  # one token each
        token = byte_level().convert_tokens_to_ids(BYTES[byte])
        if not matcher.try_consume_tokens([token]):
            assert not is_whole
            return
    assert matcher.is_accepting() == is_whole


@pytest.mark.parametrize("regex", ["(a{1000}){1000}"])
def test_what_takes_too_long_is_refused_and_the_next_form_is_not(regex: str) -> None:
    compiler = compiler_for(compile_seconds=0.5)
    with pytest.raises(ValueError, match=r"structured_outputs.regex is refused: .* took more than 0.5 s"):
        compiler.matcher(Params(regex=regex))
    compiler = compiler_for(compile_seconds=120.0)
    compiler.matcher(Params(regex="a"))


def test_a_process_that_ends_is_started_again(compiler: GrammarCompiler) -> None:
    compiler.matcher(Params(regex="first"))
    [trial] = compiler._idle
    ended = trial._process
    assert ended is not None
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, ended.pid) == min(19, own + NICENESS)  # steps go before
    os.kill(ended.pid, signal.SIGKILL)
    ended.wait()
    compiler.matcher(Params(regex="second"))
    assert compiler._idle == [trial] and trial._process is not ended


def test_a_process_that_cannot_be_started_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit(3)")
    monkeypatch.setattr(trials, "_SCRIPT", script)
    with pytest.raises(RuntimeError, match=r"could not be started .*broken\.py"):
        compiler_for().matcher(Params(regex="a"))


def test_forms_are_kept_and_the_oldest_forgotten() -> None:
    compiler = compiler_for(cache_size=2, compile_seconds=120.0)
    for regex in ("a", "b", "a", "c", "a", "b"):
        compiler.matcher(Params(regex=regex))
    assert (compiler.num_compiled, compiler.num_found) == (4, 2)  # "b" again, as "c" took its place
    for _ in range(2):  # what is refused is known, too
        with pytest.raises(ValueError, match="unclosed"):
            compiler.matcher(Params(regex="("))
    assert compiler.num_compiled == 5


def test_a_known_form_waits_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = compiler_for(compile_seconds=120.0)
    compiler.matcher(Params(regex="known"))
    asked, go_on = threading.Event(), threading.Event()

    def slow_trial(self: trials.Trials, grammar: str, is_source: bool) -> tuple[str, str]:
        asked.set()
        assert go_on.wait(60)
        return grammar, ""

    monkeypatch.setattr(trials.Trials, "try_out", slow_trial)
    other = threading.Thread(target=compiler.matcher, args=(Params(regex="slow"),))
    other.start()
    assert asked.wait(60)
    compiler.matcher(Params(regex="known"))
    go_on.set()
    other.join()
    assert compiler.num_compiled == 2


def test_two_forms_are_compiled_at_a_time_and_one_that_several_need_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, both, tried = compiler_for(compile_seconds=120.0), threading.Barrier(2, timeout=60), list[str]()

    def trial(self: trials.Trials, grammar: str, is_source: bool) -> tuple[str, str]:
        tried.append(grammar)
        both.wait()  # neither ends before the other one has begun
        return grammar, ""

    monkeypatch.setattr(trials.Trials, "try_out", trial)
    asked = [Params(regex=regex) for regex in ("a", "b", "a", "b", "a")]
    threads = [threading.Thread(target=compiler.matcher, args=(form,)) for form in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(tried) == 2 == compiler.num_compiled == len(compiler._idle)


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with engine(MODEL) as llm:
        with pytest.raises(ValueError, match=r"pip install 'vllm-blend\[structured\]'"):
            run(llm, PROMPT, greedy(4, structured_outputs=Params(regex="a")))
        assert run(llm, PROMPT, greedy(4))[0].error is None


@pytest.mark.parametrize(
    ("tokenizer", "eos", "message"),
    [
        (None, EOS, "needs a tokenizer, and the engine has none"),
        (slow(), EOS, "needs a fast tokenizer"),
        (byte_level(), (), "needs an end-of-sequence token"),
        (byte_level(), (TINY_VOCABULARY - 1,), "that is a special token of the tokenizer"),
    ],
)
def test_a_model_that_cannot_hold_a_form_says_why(tokenizer: Any, eos: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Vocabulary.from_tokenizer(tokenizer, TINY_VOCABULARY, eos)


def test_a_refused_form_changes_nothing_and_others_of_the_batch_go_on() -> None:
    bad, good = (greedy(6, structured_outputs=Params(regex=regex)) for regex in ("(", "ab"))
    with engine(MODEL) as llm:
        with pytest.raises(ValueError, match=r"structured_outputs\.regex"):
            run(llm, PROMPT, bad)
        with pytest.raises(ValueError, match=r"structured_outputs\.regex"):
            llm.llm_engine.add_request("x", PROMPT, bad)  # type: ignore[arg-type]
        assert llm.llm_engine.get_num_unfinished_requests() == 0
        refused, answered = run(llm, [PROMPT, PROMPT], [bad, good])
        assert "structured_outputs.regex" in str(refused.error) and answered.outputs[0].text == "ab"
        named = {metric.name: metric.value for metric in llm.get_metrics()}
        assert named["vllm_blend:structured_requests"] == feature(llm.llm_engine, StructuredOutputs).num_requests >= 1


def test_another_tokenizer_is_compiled_for() -> None:
    params = SamplingParams(max_tokens=30, seed=1, structured_outputs=Params(regex="the fox [0-9]{2}"))
    with engine(MODEL) as llm:
        assert run(llm, PROMPT, params)[0].outputs[0].text.startswith("the fox ")
        llm.set_tokenizer(byte_fallback())
        try:
            text = run(llm, PROMPT, params)[0].outputs[0].text
        finally:
            llm.set_tokenizer(byte_level())
    assert text.startswith("the fox ") and len(text) == 10


@pytest.mark.parametrize(
    ("given", "config", "schema"),
    [
        ({"disable_any_whitespace": True}, {}, {"whitespace_flexible": False}),
        ({}, {"disable_any_whitespace": True}, {"whitespace_flexible": False}),
        ({"whitespace_pattern": " "}, {"disable_any_whitespace": True}, {"whitespace_pattern": " "}),
    ],
)
def test_settings_of_whitespace_reach_the_grammar(
    given: dict[str, Any], config: dict[str, Any], schema: dict[str, Any]
) -> None:
    text = grammar_text(Params(json_object=True, **given), StructuredOutputsConfig(**config))
    assert f'"{next(iter(schema))}"' in text


def test_objects_are_closed_where_they_are_told_to_be() -> None:
    inner = {"properties": {"b": True}}
    schema = {"anyOf": [{"items": inner}, {"properties": {"c": inner}, "additionalProperties": True}]}
    text = grammar_text(Params(json=schema, disable_additional_properties=True), StructuredOutputsConfig())
    assert text.count('"additionalProperties": false') + text.count('"additionalProperties":false') == 2
    assert "additionalProperties" not in inner  # the caller's dict is as it was
