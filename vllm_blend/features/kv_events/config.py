"""The options of KV events: vLLM's `KVEventsConfig`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self

from vllm_blend.checks import at_least, check_field_types, check_keys, not_negative, require
from vllm_blend.config import FeatureConfig
from vllm_blend.options import Option

ZEROMQ_MAX = 2**31 - 1  # the limits of sockets are C's ints
_TCP = re.compile(r"tcp://(?P<host>.+):(?P<port>\*|\d+)")
_NAMED = re.compile(r"(ipc|inproc)://.+")


@dataclass(frozen=True)
class KVEventsConfig(FeatureConfig):
    """Events about blocks that enter and leave the prefix cache, published over ZeroMQ in vLLM's format.

    The fields are vLLM's and mean what they mean there. `publisher` is "zmq" if events are enabled and nothing else is
    said. `endpoint` is bound if it has a `*` or `::`, or begins with ipc:// or inproc://; otherwise it is connected to.
    `replay_endpoint` is always bound: there a subscriber asks for batches that it missed, of which the last
    `buffer_steps` are kept. `hwm` batches may wait for each slow subscriber, `max_queue_size` for all of them.

    `encoding` is this project's: events are tagged arrays, as vLLM wrote them for long, or maps, as newer versions do.

    Raises ValueError naming the field and the fix.
    """

    title: ClassVar[str] = "KV events"
    works_across_ranks: ClassVar[bool] = True  # the process that schedules publishes, and there is one
    name: ClassVar[str] = "kv_events_config"
    extension: ClassVar[str | None] = "vllm_blend.features.kv_events.extension:make_kv_events"

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    encoding: Literal["array", "map"] = "array"

    def __post_init__(self) -> None:
        label = f"{self.name}: "
        check_field_types(self, label)
        if self.publisher is None:
            object.__setattr__(self, "publisher", "zmq" if self.enable_kv_cache_events else "null")
        not_negative(f"{label}buffer_steps", self.buffer_steps)
        at_least(1)(f"{label}hwm", self.hwm)
        at_least(1)(f"{label}max_queue_size", self.max_queue_size)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            require(value < ZEROMQ_MAX, f"{label}{name}={value} is too large: use at most {ZEROMQ_MAX - 1}")
        for name in ("endpoint", "replay_endpoint", "topic"):
            _check_text(f"{label}{name}", getattr(self, name) or "")
        _check_endpoint(f"{label}endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _check_endpoint(f"{label}replay_endpoint", self.replay_endpoint)
            require(
                self.replay_endpoint != self.endpoint or self.endpoint.endswith(":*"),
                f"{label}endpoint and replay_endpoint are both {self.endpoint!r}: give replay_endpoint another port",
            )

    @property
    def is_on(self) -> bool:
        """Return whether events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"

    def check_engines(self, option: str, count: int) -> None:
        """Raise ValueError if `count` engines with this configuration, as `option` asks for, would bind one address."""
        if not self.is_on or count == 1:
            return
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            if address is None or address.endswith(":*") or address.startswith("inproc://"):
                continue
            require(
                name == "endpoint" and not is_bound(address),
                f"kv_events_config: {name}={address!r} is one address, and {option}={count} makes several engines, of "
                f"which only one on a machine can listen there: use {option}=1 and start an application for each "
                "engine, with an address of its own, or use 'tcp://*:*' for free ports, which the engines log",
            )

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """Return the one option, which has all of the fields, as in vLLM."""
        keys = ", ".join(each.name for each in fields(cls))
        text = (
            'events about the prefix cache, as JSON: {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}; it '
            f"may have {keys}"
        )
        return (Option(name=cls.name, type=dict[str, Any] | cls | None, default=None, help=text),)

    @classmethod
    def from_values(cls, values: Mapping[str, Any], **others: Any) -> Self:
        given = values[cls.name] or {}
        if isinstance(given, cls):
            return given
        check_keys(cls.name, given, [each.name for each in fields(cls)])
        return cls(**given)


def is_bound(endpoint: str) -> bool:
    """Return whether the endpoint is an address of this machine, not one that a subscriber listens at: vLLM's rule."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _check_text(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}={value!r} is no text in UTF-8 ({error.reason}): leave {value[error.start]!r} out"
        ) from error


def _check_endpoint(name: str, endpoint: str) -> None:
    tcp = _TCP.fullmatch(endpoint)
    require(
        tcp is not None or _NAMED.fullmatch(endpoint) is not None,
        f"{name}={endpoint!r} is no ZeroMQ address: use 'tcp://*:5557', 'tcp://host:5557', 'ipc:///path' or "
        "'inproc://name'",
    )
    if tcp is not None and tcp["port"] != "*":
        require(0 < int(tcp["port"]) < 65536, f"{name}={endpoint!r}: the port must be in 1..65535, or * for a free one")
