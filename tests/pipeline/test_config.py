"""The pipeline's settings: one set of defaults, errors that name the key and what was meant."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_blend.pipeline.config import (
    SECTIONS,
    DecodeConfig,
    PrefillConfig,
    RetrievalConfig,
    add_section_flags,
    load_config,
    make_section,
    section_from_flags,
)
from vllm_blend.pipeline.prompts import PROMPT_STYLES, reworded

ROOT = Path(__file__).parents[2]


def test_the_file_that_is_shipped_has_every_key_with_its_default() -> None:
    path = ROOT / "configs/musique.yaml"
    assert load_config(path) == load_config()
    assert yaml.safe_load(path.read_text()) == load_config()


def test_sections_are_plain_dicts_that_make_their_dataclass() -> None:
    cfg = load_config()
    assert cfg["retrieval"]["dataset_name"] == "musique_s" and cfg["prefill"]["model_id"] == "inputs/demo-model"
    assert RetrievalConfig(**cfg["retrieval"]) == RetrievalConfig()
    assert all(setting.help for cls in SECTIONS.values() for setting in cls.options())


def test_a_file_changes_what_it_names_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("retrieval: {top_k: 8}\ndecode: {blend_recompute_ratio: 1}\nprefill:\n")
    cfg = load_config(path)
    assert cfg["retrieval"].pop("top_k") == 8
    ratio = cfg["decode"].pop("blend_recompute_ratio")
    assert ratio == 1.0 and isinstance(ratio, float)
    for section, values in cfg.items():
        assert values.items() <= load_config()[section].items()


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "c.yaml") == load_config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("retrieval: {topk: 8}", r"retrieval\.topk is not a setting \(did you mean 'top_k'\?\)"),
        ("retrieval: {qqqq: 8}", r"retrieval\.qqqq is not a setting; known: model_id"),
        ("retreival: {top_k: 8}", r"unknown section 'retreival' \(did you mean 'retrieval'\?\)"),
        ("retrieval: {top_k: '8'}", r"retrieval\.top_k='8' must be a whole number, not str"),
        ("retrieval: {top_k: true}", r"retrieval\.top_k=True must be a whole number, not bool"),
        ("retrieval: {include_neighbors: 1}", r"retrieval\.include_neighbors=1 must be True or False, not int"),
        ("retrieval: {top_k: 0}", r"retrieval\.top_k=0 must be a whole number of at least 1"),
        (
            "retrieval: {backend: colbret}",
            r"retrieval\.backend='colbret' is unknown: .* \(did you mean 'colbert'\?\)",
        ),
        ("retrieval: {dataset_name: ../x}", r"retrieval\.dataset_name '\.\./x' becomes a part of file names"),
        ("retrieval: {scope: world}", r"retrieval\.scope='world' is unknown: use one of 'sample', 'corpus'"),
        ("retrieval: {retrieved_key: ctxs}", r"retrieval\.retrieved_key 'ctxs' would overwrite"),
        ("prefill: {dtype: float8}", r"prefill\.dtype='float8' is unknown: use one of 'auto'"),
        ("prefill: {top_k_gpu: -1}", r"prefill\.top_k_gpu=-1 must be a whole number of at least 0"),
        ("decode: {blend_recompute_ratio: 1.5}", r"decode\.blend_recompute_ratio=1\.5 .* use a number from 0 to 1"),
        ("decode: [1]", "section decode must map keys to values, not list"),
        ("[1]", "expected sections retrieval, prefill, decode, not list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        load_config(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        load_config("none.yaml")


NO_NAMES = ["", ".", "..", "../x", "a/b", "/etc/x", "a/", "./a", "a\0b", "x" * 200, "é" * 100]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_data_sets_name_leads_to_no_other_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dataset_name .* becomes a part of file names: use 1 to 150") as raised:
        RetrievalConfig(dataset_name=name)
    assert repr(name) in str(raised.value)
    for fine in ("musique_s", "My data (2)", "..x", "a\\b", "x" * 150):
        config = RetrievalConfig(dataset_name=fine, output_dir=str(tmp_path))
        assert config.output_path.parent == tmp_path and config.output_path.name.startswith(fine)


def test_paths_follow_the_names() -> None:
    retrieval = RetrievalConfig(dataset_name="wikimqa_s", top_k=3)
    assert retrieval.input_path == Path("inputs/wikimqa_s.json")
    assert retrieval.output_path == Path("results/retrieval/wikimqa_s_rag_both_k3.json")
    assert PrefillConfig(top_k_gpu=2).summary_path("samsum") == Path("results/kv_caches/samsum_kv_top2.json")


def parse(section: str, flags: list[str]) -> Any:
    parser = argparse.ArgumentParser()
    add_section_flags(parser, SECTIONS[section])
    return section_from_flags(parser, parser.parse_args(flags), section)


def test_flags_go_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("decode: {blend_selector: random, max_tokens: 7}")
    config = parse("decode", ["--config", str(tmp_path / "c.yaml"), "--max-tokens", "9"])
    assert config == DecodeConfig(blend_selector="random", max_tokens=9)
    assert parse("decode", []) == DecodeConfig()


@pytest.mark.parametrize(("flags", "value"), [([""], True), (["true"], True), (["0"], False), (["no"], False)])
def test_switches_take_a_value_from_the_environment_or_none(flags: list[str], value: bool) -> None:
    config = parse("retrieval", ["--include-neighbors", *[flag for flag in flags if flag]])
    assert config.include_neighbors is value


@pytest.mark.parametrize("flags", [["--include-neighbors", "maybe"], ["--top-k", "0"], ["--config", "none.yaml"]])
def test_wrong_flags_end_the_program(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("retrieval", flags)
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"retrieval: {top_k: \xff}", b"[" * 100_000], ids=["not UTF-8", "deep"])
def test_a_file_that_is_no_text_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"settings\.yaml is not valid YAML"):
        load_config(path)


@pytest.mark.parametrize("name", ["instruction", "template"])
def test_words_that_are_no_unicode_are_named_before_any_work(name: str) -> None:
    with pytest.raises(ValueError, match=f"retrieval.{name}=.* is not UTF-8 at character 2"):
        make_section(RetrievalConfig, "retrieval", {name: "a \udcff{question}"})


def test_a_long_template_does_not_fill_the_message() -> None:
    with pytest.raises(ValueError, match=r"template='aa.*\(10000000 characters\)") as error:
        make_section(RetrievalConfig, "retrieval", {"template": "a" * 10_000_000})
    assert len(str(error.value)) < 1000


def test_a_template_is_no_format_string() -> None:
    section = make_section(RetrievalConfig, "retrieval", {"template": "{0.__class__} {question} {x!r:>9}{{"})
    style = reworded(PROMPT_STYLES["musique"], section.instruction, section.template)
    assert style.suffix("{question} {y}") == "{0.__class__} {question} {y} {x!r:>9}{{"
