"""Importing transformers without torch's compiler, which takes a second of CPU and which no engine needs.

The module of every configuration imports transformers' own generation loop, one method of which is marked by
`torch.compiler.disable`, and that imports `torch._dynamo`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch

_one_at_a_time = threading.RLock()  # two threads that load models would each put back what the other has put there


@contextmanager
def without_compiler() -> Iterator[None]:
    """Let functions that are marked by `torch.compiler.disable` meanwhile be marked at their first call instead."""
    with _one_at_a_time:
        if "torch._dynamo" in sys.modules:
            yield
            return
        disable = torch.compiler.disable
        torch.compiler.disable = partial(_disable_later, disable)
        try:
            yield
        finally:
            torch.compiler.disable = disable


def _disable_later(disable: Callable[..., Any], function: Any = None, *args: Any, **options: Any) -> Any:
    if function is None:  # used as a decorator with arguments
        return lambda marked: _disable_later(disable, marked, *args, **options)
    if not callable(function) or isinstance(function, type):
        return disable(function, *args, **options)
    marked: list[Any] = []

    @wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        if not marked:
            marked.append(disable(function, *args, **options))
        return marked[0](*values, **named)

    return call
