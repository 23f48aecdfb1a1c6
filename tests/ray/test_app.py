"""The options of an application on Ray: read as `vllm-blend serve` reads them, and refused before anything starts."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checkout import ROOT
from vllm_blend.command_line import BAD_INPUT
from vllm_blend.features.kv_events.config import KVEventsConfig
from vllm_blend.ray import build_app, command, generate
from vllm_blend.ray.app import build, read_options
from vllm_blend.ray.options import RayOptions

MODEL = str(ROOT / "inputs" / "demo-model-reuse")


def test_options_go_to_their_groups() -> None:
    config = read_options({"model": MODEL, "max-num-seqs": 4, "api_key": ["k"], "replicas": 2, "epsilon": 0.5})
    assert config.engine.max_num_seqs == 4 and config.engine.enable_blending
    assert config.server.api_key == ["k"]
    assert (config.ray.replicas, config.ray.epsilon, config.ray.most_replicas) == (2, 0.5, 2)
    assert config.server.served_model_name == [MODEL]


def test_text_is_read_by_the_options_types() -> None:
    given = {"model": MODEL, "replicas": "2", "enable_blending": "false", "num_gpus": "0.5", "routing": "least_loaded"}
    config = read_options(given | {"resources": "{slot: 1}", "max_replicas": "null"})
    assert (config.ray.replicas, config.ray.num_gpus, config.ray.resources) == (2, 0.5, {"slot": 1})
    assert config.ray.routing == "least_loaded" and config.ray.max_replicas is None
    assert not config.engine.enable_blending


def test_files_are_found_from_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "keys.txt").write_text("tenant key\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(MODEL)
    config = read_options({"model": "model", "api_keys": "keys.txt", "chat_template": "{{ messages }}"})
    assert config.engine.model == MODEL
    assert config.server.served_model_name == ["model"]  # as clients know it
    assert config.server.api_keys == str(tmp_path / "keys.txt")
    assert config.server.chat_template == "{{ messages }}"


def test_a_store_that_is_not_there_yet_has_an_absolute_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_options({"model": MODEL, "chunk_store_path": "store"}).engine.chunk_store_path == str(
        tmp_path / "store"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "there is no model"),
        ({"model": MODEL, "port": 8000}, "port is an option of `vllm-blend serve` alone; with Ray Serve: http_options"),
        ({"model": MODEL, "replica": 2}, "unknown option replica: did you mean replicas?"),
        ({"model": MODEL, "max_model_length": 9}, "unknown option max_model_length"),
        ({"model": MODEL, "replicas": 0}, "replicas=0"),
        ({"model": MODEL, "replicas": "two"}, "replicas"),
        ({"model": MODEL, "replicas": 3, "max_replicas": 2}, "max_replicas=2 is less than replicas=3"),
        ({"model": MODEL, "target_requests": 4.0}, "target_requests is for autoscaling: give max_replicas"),
        ({"model": MODEL, "routing": "random"}, "routing"),
        ({"model": MODEL, "epsilon": -0.1}, "epsilon=-0.1"),
        ({"model": MODEL, "max-num-seqs": 4, "max_num_seqs": 5}, "max_num_seqs is given twice"),
        ({"model": MODEL, "resources": "{a"}, "resources='{a' cannot be read"),
        ({"model": MODEL, "resources": {"slot": -1}}, "the amount of 'slot' must be a finite number"),
        ({"model": MODEL, "resources": {"slot": float("nan")}}, "the amount of 'slot' must be a finite number"),
        ({"model": MODEL, "resources": {"slot": "1"}}, "the amount of 'slot' must be a finite number"),
        ({"model": MODEL, "resources": {"GPU": 1}}, "give num_cpus or num_gpus"),
        ({"model": MODEL, "num_gpus": 1.5}, "must be whole if it is above 1"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as raised:
        read_options(options)
    assert message in str(raised.value)


EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://*:*"}


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ({"endpoint": "tcp://*:5557"}, "endpoint='tcp://*:5557' is one address"),
        ({"endpoint": "ipc:///tmp/events"}, "endpoint='ipc:///tmp/events' is one address"),
        ({"replay_endpoint": "tcp://*:5558"}, "replay_endpoint='tcp://*:5558' is one address"),
    ],
)
def test_several_engines_do_not_publish_at_one_address(events: dict[str, Any], message: str) -> None:
    engine = {"model": MODEL, "kv_events_config": EVENTS | events}
    for count in ({"replicas": 2}, {"max_replicas": 2}):
        with pytest.raises(ValueError) as raised:
            build_app(engine | count)
        assert message in str(raised.value) and f"use {next(iter(count))}=1" in str(raised.value)
    dataset: Any = None  # which is not looked at yet
    with pytest.raises(ValueError) as raised:
        generate(dataset, engine, concurrency=2)
    assert message in str(raised.value) and "use concurrency=1" in str(raised.value)


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ({}, 2),  # free ports
        ({"endpoint": "tcp://router:5557"}, 2),  # the router listens
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}, 1),
        ({"endpoint": "tcp://*:5557", "enable_kv_cache_events": False}, 2),
    ],
)
def test_engines_with_addresses_of_their_own_may_publish(events: dict[str, Any], count: int) -> None:
    config = read_options({"model": MODEL, "kv_events_config": EVENTS | events}).engine.create_engine_config()
    config.feature(KVEventsConfig).check_engines("replicas", count)


def test_ranks_that_cannot_share_the_model_are_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3: .*; give one that fits this model: 1, 2, 6$"):
        build_app({"model": MODEL, "tensor_parallel_size": 3})


def test_the_example_is_read() -> None:
    example = yaml.safe_load((ROOT / "configs" / "ray_serve.yaml").read_text())
    [application] = example["applications"]
    assert application["import_path"] == "vllm_blend.ray.app:build"
    assert len(inspect.signature(build).parameters) == 1  # as Ray Serve demands
    config = read_options(application["args"] | {"model": MODEL})
    assert config.ray.replicas == 2 and config.engine.chunk_store_path


def test_the_page_has_every_option() -> None:
    text = (ROOT / "docs" / "ray.md").read_text()
    table = {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert {option.name for option in RayOptions.options()} == table


def as_file(folder: Path, text: str) -> str:
    path = folder / f"serve{len(text)}.yaml"
    path.write_text(text)
    return str(path)


EXAMPLE = (ROOT / "configs" / "ray_serve.yaml").read_text().replace("inputs/demo-model-reuse", MODEL)
UNKNOWN = "error: unknown option replica: did you mean replicas?\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([f"model={MODEL}", "replica=2"], UNKNOWN),
        ([EXAMPLE.replace("replicas:", "replica:")], UNKNOWN),
        ([f"model={MODEL}", "max_model_len=4096"], "error: max_model_len=4096 is above the 1024 positions"),
        (["applications: ["], "cannot be read as YAML: while parsing"),
        (["app: 1"], "has no list of applications: see configs/ray_serve.yaml"),
    ],
)
def test_a_wrong_option_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """Ray is not asked: for a file it would start a cluster first."""
    given = arguments if "=" in arguments[0] else [as_file(tmp_path, arguments[0])]
    assert command.main(given) == BAD_INPUT
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "none.yaml")]) == BAD_INPUT
    assert "none.yaml" in capsys.readouterr().err


def test_applications_are_those_of_this_package(tmp_path: Path) -> None:
    assert command.applications([as_file(tmp_path, EXAMPLE)])[0]["replicas"] == 2
    text = "applications: [{import_path: 'a:b', args: {replica: 2}}, {import_path: 'vllm_blend.ray.app:build'}]"
    assert command.applications([as_file(tmp_path, text)]) == [{}]
