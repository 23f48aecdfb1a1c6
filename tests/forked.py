"""Processes that run functions: forked from a server that has imported what they need, which takes three seconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.kv_store.disk_processes", "transformers.modeling_utils"])


def end_server() -> None:
    """Give the server's memory back. The next process that is started starts another one."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]  # its own tests end it so
