"""Logits processors: functions of the user that change a request's logits (`SamplingParams.logits_processors`)."""

from __future__ import annotations

import inspect
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

# (output token ids, logits) -> logits, or (prompt token ids, output token ids, logits) -> logits
LogitsProcessor: TypeAlias = (
    Callable[[list[int], torch.Tensor], torch.Tensor] | Callable[[list[int], list[int], torch.Tensor], torch.Tensor]
)


_LARGEST = 1e30  # stands for +inf, of which no probability could be computed


def check_processors(processors: Any) -> list[LogitsProcessor]:
    """Return the processors as a list. Raises TypeError for what is not callable with two or three arguments."""
    if processors is None:
        return []
    if callable(processors) or not isinstance(processors, Iterable):
        raise TypeError(f"logits_processors={processors!r} must be a list of functions")
    checked = list(processors)
    for index, processor in enumerate(checked):
        if not callable(processor):
            raise TypeError(f"logits_processors[{index}] is {processor!r}, which is not callable: give a function")
        if _num_arguments(processor) not in (2, 3):
            raise TypeError(
                f"logits_processors[{index}] takes {_num_arguments(processor)} arguments: it must take "
                "(output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits)"
            )
    return checked


def run_processors(
    processors: Sequence[Any], prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], row: torch.Tensor
) -> torch.Tensor:
    """Return a row of logits, [vocabulary] float32, as the processors change it one after the other.

    They may change the row in place, and get copies of the token ids. Raises RuntimeError naming the processor that
    raised, or that returned anything but logits. These may be infinite: -inf excludes a token, and +inf puts it before
    all others.
    """
    shape = row.shape
    for index, processor in enumerate(processors):
        try:
            tokens = [list(output_token_ids)]
            if _num_arguments(processor) == 3:
                tokens.insert(0, list(prompt_token_ids))
            result = processor(*tokens, row)
        except BaseException as error:  # any error ends this request alone
            if _may_come_from_signal(error):
                raise
            raise RuntimeError(f"logits_processors[{index}] raised {_describe(error)}") from error
        if not isinstance(result, torch.Tensor) or result.shape != shape or result.is_complex():
            tensor = isinstance(result, torch.Tensor)
            given = f"{result.dtype} {list(result.shape)}" if tensor else type(result).__name__
            raise RuntimeError(
                f"logits_processors[{index}] returned {given}: it must return the logits, a tensor of real numbers "
                f"{list(shape)}"
            )
        row = result.to(row).clamp(max=_LARGEST)  # NaN stays
        if bool(row.isnan().any()):
            raise RuntimeError(f"logits_processors[{index}] returned NaN: use numbers, or -inf for what must not come")
    return row


def _describe(error: BaseException) -> str:
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except BaseException as other:
        if _may_come_from_signal(other):
            raise
        return f"{name}, whose text raises {type(other).__name__}"


def _may_come_from_signal(error: BaseException) -> bool:
    """Return whether the handler of a signal, such as that of Ctrl-C, may have raised this: it runs in the main thread,
    between any two lines, and what it raises is to end what that thread does."""
    ordinary = isinstance(error, (Exception, CancelledError, GeneratorExit))
    return not ordinary and threading.current_thread() is threading.main_thread()


def _num_arguments(processor: Callable[..., Any]) -> int:
    """Return how many arguments a function needs, 2 if it takes any number or does not tell."""
    try:
        parameters = inspect.signature(processor).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return 2
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 2
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in by_position and parameter.default is parameter.empty for parameter in parameters)
