"""Ray Serve, which takes ten seconds to come and go, for all tests of applications. They are the last ones of a run."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def serve_url() -> Iterator[str]:
    """Ray Serve without an application, on four CPUs."""
    import ray  # which the other environments do not have
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(num_cpus=4, object_store_memory=200 << 20, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
