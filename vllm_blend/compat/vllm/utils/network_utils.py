"""`vllm.utils.network_utils`."""

from __future__ import annotations

import socket


def get_open_port() -> int:
    """Return a TCP port that no process listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
