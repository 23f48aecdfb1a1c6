"""The engine in a process of its own, and the server's side of it."""

from __future__ import annotations

try:
    import msgspec  # noqa: F401
    import zmq  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"an engine in its own process needs {error.name}: run pip install 'vllm-blend[server]'", name=error.name
    ) from error
