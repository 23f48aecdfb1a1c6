"""Processes that run functions: forked from a server that has imported what they need, which takes three seconds."""

from __future__ import annotations

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["tests.kv_store.disk_processes", "vllm_blend.quality.parallel", "transformers.modeling_utils"]
)
