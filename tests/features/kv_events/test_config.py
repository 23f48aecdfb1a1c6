"""What users may say about KV events, and what they are told when it cannot be."""

from __future__ import annotations

import argparse
import importlib
import json
import socket
import sys
from typing import Any

import pytest

from tests.engine.engines import new_llm
from vllm_blend import EngineArgs
from vllm_blend.features.kv_events.config import KVEventsConfig, is_bound

ON = {"enable_kv_cache_events": True}
SMALL: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 8}


def config_of(args: EngineArgs) -> KVEventsConfig:
    return args.create_engine_config().feature(KVEventsConfig)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable_events": True}, r"kv_events_config has no option 'enable_events': use enable_kv_cache_events, "),
        ({"endpont": "tcp://*:1"}, "has no option 'endpont': .*; did you mean 'endpoint'?"),
        ({"publisher": "kafka"}, "kv_events_config: publisher='kafka' is unknown: use one of 'null', 'zmq' or None"),
        ({"endpoint": "5557"}, "kv_events_config: endpoint='5557' is no ZeroMQ address: use 'tcp://"),
        ({"endpoint": "tcp://*"}, r"endpoint='tcp://\*' is no ZeroMQ address"),
        ({"endpoint": "udp://*:5557"}, "endpoint='udp://.* is no ZeroMQ address"),
        ({"endpoint": "ipc://"}, "endpoint='ipc://' is no ZeroMQ address"),
        ({"endpoint": "tcp://*:70000"}, r"endpoint='tcp://\*:70000': the port must be in 1..65535"),
        ({"endpoint": "tcp://*:0"}, r"endpoint='tcp://\*:0': the port must be in 1..65535"),
        ({"endpoint": 5557}, "kv_events_config: endpoint=5557 must be a string, not int"),
        ({"replay_endpoint": "x"}, "kv_events_config: replay_endpoint='x' is no ZeroMQ address"),
        ({"replay_endpoint": "tcp://*:5557"}, r"are both 'tcp://\*:5557': give replay_endpoint another port"),
        ({"buffer_steps": -1}, "kv_events_config: buffer_steps=-1 must not be negative"),
        ({"buffer_steps": "many"}, "kv_events_config: buffer_steps='many' must be a whole number, not str"),
        ({"hwm": 0}, "kv_events_config: hwm=0 must be a whole number of at least 1"),
        ({"max_queue_size": 0}, "kv_events_config: max_queue_size=0 must be a whole number of at least 1"),
        ({"hwm": 2**40}, "kv_events_config: hwm=1099511627776 is too large: use at most 2147483646"),
        ({"buffer_steps": 2**31 - 1}, "kv_events_config: buffer_steps=2147483647 is too large: use at most 2147483646"),
        ({"max_queue_size": 2**70}, "kv_events_config: max_queue_size=1180591620717411303424 is too large"),
        ({"topic": "a\ud800"}, r"kv_events_config: topic='a\\ud800' is no text in UTF-8 .*: leave '\\ud800' out"),
        ({"endpoint": "ipc://\ud800"}, r"kv_events_config: endpoint='ipc://\\ud800' is no text in UTF-8"),
        ({"replay_endpoint": "ipc://\ud800"}, r"kv_events_config: replay_endpoint='ipc://\\ud800' is no text in UTF-8"),
        ({"topic": None}, "kv_events_config: topic=None must be a string"),
        ({"encoding": "json"}, "kv_events_config: encoding='json' is unknown: use one of 'array', 'map'"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_loaded(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs("nowhere", kv_events_config=ON | given).create_engine_config()


def test_values_are_given_as_a_dict_as_json_or_as_vllms_class() -> None:
    vllm = importlib.import_module("vllm_blend.compat.vllm.config")
    given = ON | {"endpoint": "tcp://router:5557", "topic": "kv@pod@model", "buffer_steps": 3}
    expected = KVEventsConfig(True, "zmq", "tcp://router:5557", None, 3, topic="kv@pod@model")
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    flags = parser.parse_args(["--model", "m", "--kv-events-config", json.dumps(given)])
    as_class = vllm.KVEventsConfig(**given)
    for args in (
        EngineArgs("m", kv_events_config=given),
        EngineArgs("m", kv_events_config=as_class),
        EngineArgs.from_cli_args(flags),
    ):
        assert config_of(args) == expected and config_of(args).is_on


@pytest.mark.parametrize("given", [None, {}, {"publisher": "zmq"}, ON | {"publisher": "null"}])
def test_events_are_off_unless_they_are_enabled_and_published(given: dict[str, Any] | None) -> None:
    assert not config_of(EngineArgs("m", kv_events_config=given)).is_on


def test_addresses_are_bound_by_vllms_rule() -> None:
    bound = ["tcp://*:5557", "tcp://127.0.0.1:*", "tcp://[::]:5557", "ipc:///tmp/a", "inproc://a"]
    assert all(is_bound(endpoint) for endpoint in bound)
    assert not is_bound("tcp://127.0.0.1:5557") and not is_bound("tcp://router.svc:5557")


def test_events_need_the_prefix_cache() -> None:
    with pytest.raises(
        ValueError, match=r"kv_events_config announces blocks .* enable_prefix_caching=False: leave one"
    ):
        new_llm(kv_events_config=ON, enable_prefix_caching=False, **SMALL)


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_a_port_in_use_is_named_and_the_other_one_is_free_again(field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        free = unused.getsockname()[1]
    taken = socket.create_server(("", 0))
    port = taken.getsockname()[1]
    given = ON | {"endpoint": f"tcp://*:{free}", field: f"tcp://*:{port}"}
    with pytest.raises(
        ValueError, match=rf"kv_events_config: {field}='tcp://\*:{port}' cannot be used .*another engine"
    ):
        new_llm(kv_events_config=given, **SMALL)
    taken.close()
    for _ in range(2):  # a port is free as soon as its engine has been shut down
        with new_llm(kv_events_config=given, **SMALL):
            pass


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_a_missing_package_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm_blend.features.kv_events.publisher", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        ValueError, match=rf"but {missing} cannot be imported: run pip install 'vllm-blend\[kv-events\]'"
    ):
        new_llm(kv_events_config=ON, **SMALL)
