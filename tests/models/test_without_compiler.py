"""Functions that are marked by `torch.compiler.disable` later, which is without effect on what they do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vllm_blend.models.without_compiler import without_compiler


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `torch.compiler.disable` was called with, in a process that seems not to have imported the compiler."""
    calls: list[Any] = []

    def disable(function: Any = None, recursive: bool = True, *, reason: str | None = None) -> Any:
        calls.append((function, recursive, reason))
        return function

    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(torch.compiler, "disable", disable)
    return calls


def test_functions_are_marked_once_when_they_are_called(marked: list[Any]) -> None:
    def double(value: int) -> int:
        """Double it."""
        return 2 * value

    disable: Callable[..., Any] = torch.compiler.disable
    with without_compiler():
        plain = torch.compiler.disable(double)
        with_arguments = torch.compiler.disable(recursive=False, reason="slow")(double)
    assert torch.compiler.disable is disable and marked == []
    assert plain.__name__ == "double" and plain.__doc__ == "Double it."
    assert [plain(1), plain(value=2), with_arguments(3)] == [2, 4, 6]
    assert marked == [(double, True, None), (double, False, "slow")]


def test_classes_and_what_comes_after_an_error_are_marked_at_once(marked: list[Any]) -> None:
    class Cache:
        pass

    with pytest.raises(ImportError), without_compiler():
        assert torch.compiler.disable(Cache) is Cache
        raise ImportError("no such module")
    torch.compiler.disable(print)
    assert [function for function, _, _ in marked] == [Cache, print]


def test_nothing_changes_where_the_compiler_is_there(marked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._dynamo", sys)
    with without_compiler():
        torch.compiler.disable(print)
    assert [function for function, _, _ in marked] == [print]
