"""The pipeline's settings: one set of defaults, errors that name the key and what was meant."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from vllm_blend.pipeline.config import (
    SECTIONS,
    DecodeConfig,
    PrefillConfig,
    RetrievalConfig,
    add_section_flags,
    load_config,
    section_from_flags,
)

ROOT = Path(__file__).parents[2]


def test_the_file_that_is_shipped_has_every_key_with_its_default():
    path = ROOT / "configs/musique.yaml"
    assert load_config(path) == load_config()
    assert yaml.safe_load(path.read_text()) == load_config()


def test_sections_are_plain_dicts_that_make_their_dataclass():
    cfg = load_config()
    assert cfg["retrieval"]["dataset_name"] == "musique_s" and cfg["prefill"]["model_id"] == "inputs/demo-model"
    assert RetrievalConfig(**cfg["retrieval"]) == RetrievalConfig()
    assert all(setting.metadata["help"] for cls in SECTIONS.values() for setting in fields(cls))


def test_a_file_changes_what_it_names_and_no_more(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("retrieval: {top_k: 8}\ndecode: {blend_recompute_ratio: 1}\nprefill:\n")
    cfg = load_config(path)
    assert cfg["retrieval"].pop("top_k") == 8
    ratio = cfg["decode"].pop("blend_recompute_ratio")
    assert ratio == 1.0 and isinstance(ratio, float)
    for section, values in cfg.items():
        assert values.items() <= load_config()[section].items()


def test_an_empty_file_is_all_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "c.yaml") == load_config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("retrieval: {topk: 8}", r"retrieval\.topk is not a setting \(did you mean 'top_k'\?\)"),
        ("retrieval: {qqqq: 8}", r"retrieval\.qqqq is not a setting; known: model_id"),
        ("retreival: {top_k: 8}", r"unknown section 'retreival' \(did you mean 'retrieval'\?\)"),
        ("retrieval: {top_k: '8'}", r"retrieval\.top_k must be int, not str"),
        ("retrieval: {top_k: true}", r"retrieval\.top_k must be int, not bool"),
        ("retrieval: {include_neighbors: 1}", r"retrieval\.include_neighbors must be bool, not int"),
        ("retrieval: {top_k: 0}", r"retrieval\.top_k must be at least 1, not 0"),
        ("retrieval: {backend: colbret}", r"retrieval\.backend must be one of .* \(did you mean 'colbert'\?\)"),
        ("retrieval: {dataset_name: ../x}", r"retrieval\.dataset_name '\.\./x' becomes a part of file names"),
        ("retrieval: {scope: world}", r"retrieval\.scope must be one of sample, corpus"),
        ("retrieval: {retrieved_key: ctxs}", r"retrieval\.retrieved_key 'ctxs' would overwrite"),
        ("prefill: {dtype: float8}", r"prefill\.dtype must be one of auto"),
        ("prefill: {top_k_gpu: -1}", r"prefill\.top_k_gpu must be at least 0"),
        ("decode: {blend_recompute_ratio: 1.5}", r"decode\.blend_recompute_ratio must be from 0 to 1, not 1\.5"),
        ("decode: [1]", "section decode must map keys to values, not list"),
        ("[1]", "expected sections retrieval, prefill, decode, not list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_mistakes_are_named(tmp_path, text, message):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        load_config(path)
    assert str(path) in str(raised.value)


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        load_config("none.yaml")


NO_NAMES = ["", ".", "..", "../x", "a/b", "/etc/x", "a/", "./a", "a\0b", "x" * 200, "é" * 100]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_data_sets_name_leads_to_no_other_folder(name, tmp_path):
    with pytest.raises(ValueError, match=r"dataset_name .* becomes a part of file names: use 1 to 150") as raised:
        RetrievalConfig(dataset_name=name)
    assert repr(name) in str(raised.value)
    for fine in ("musique_s", "My data (2)", "..x", "a\\b", "x" * 150):
        config = RetrievalConfig(dataset_name=fine, output_dir=str(tmp_path))
        assert config.output_path.parent == tmp_path and config.output_path.name.startswith(fine)


def test_paths_follow_the_names():
    retrieval = RetrievalConfig(dataset_name="wikimqa_s", top_k=3)
    assert retrieval.input_path == Path("inputs/wikimqa_s.json")
    assert retrieval.output_path == Path("results/retrieval/wikimqa_s_rag_both_k3.json")
    assert PrefillConfig(top_k_gpu=2).summary_path("samsum") == Path("results/kv_caches/samsum_kv_top2.json")


def parse(section: str, flags: list[str]):
    parser = argparse.ArgumentParser()
    add_section_flags(parser, SECTIONS[section])
    return section_from_flags(parser, parser.parse_args(flags), section)


def test_flags_go_over_the_file_and_the_file_over_the_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("decode: {blend_selector: random, max_tokens: 7}")
    config = parse("decode", ["--config", str(tmp_path / "c.yaml"), "--max-tokens", "9"])
    assert config == DecodeConfig(blend_selector="random", max_tokens=9)
    assert parse("decode", []) == DecodeConfig()


@pytest.mark.parametrize(("flags", "value"), [([""], True), (["true"], True), (["0"], False), (["no"], False)])
def test_switches_take_a_value_from_the_environment_or_none(flags, value):
    config = parse("retrieval", ["--include-neighbors", *[flag for flag in flags if flag]])
    assert config.include_neighbors is value


@pytest.mark.parametrize("flags", [["--include-neighbors", "maybe"], ["--top-k", "0"], ["--config", "none.yaml"]])
def test_wrong_flags_end_the_program(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        parse("retrieval", flags)
    assert stop.value.code == 2
    assert "error: " in capsys.readouterr().err
