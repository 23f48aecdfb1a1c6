"""The backend that starts the ranks of an engine is the one asked for, or an error says why it cannot be."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from vllm_blend import EngineArgs
from vllm_blend.executor.backends import choose_backend


@pytest.mark.parametrize(
    ("asked", "size", "chosen"),
    [(None, 1, "uni"), ("uni", 1, "uni"), ("mp", 1, "uni"), ("ray", 1, "uni"), (None, 2, "mp"), ("mp", 2, "mp")],
)
def test_one_rank_needs_no_other_process(asked: Any, size: int, chosen: str) -> None:
    args = EngineArgs("m", tensor_parallel_size=size, distributed_executor_backend=asked)
    assert choose_backend(args.create_engine_config()) == chosen


def test_ray_has_to_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder that happens to have its name is not Ray."""
    args = EngineArgs("m", tensor_parallel_size=2, distributed_executor_backend="ray")
    plain = importlib.util.spec_from_file_location("ray", tmp_path / "ray.py")
    (tmp_path / "ray").mkdir()
    folder = importlib.machinery.PathFinder.find_spec("ray", [str(tmp_path)])
    for found in (None, folder):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, found=found: found)
        with pytest.raises(ImportError, match=r"needs ray: run pip install 'vllm-blend\[ray\]', or give 'mp'"):
            args.create_engine_config()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: plain)
    assert choose_backend(args.create_engine_config()) == "ray"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"distributed_executor_backend": "uni"}, "'uni' is one process, but tensor_parallel_size is 2: give 'mp' or"),
        (
            {"distributed_executor_backend": "rya"},
            "distributed_executor_backend='rya' is unknown: .*did you mean 'ray'",
        ),
        ({"ray_placement_timeout": 0.0}, "ray_placement_timeout=0.0 must be positive"),
    ],
)
def test_what_is_wrong_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs("m", tensor_parallel_size=2, **options).create_engine_config()
