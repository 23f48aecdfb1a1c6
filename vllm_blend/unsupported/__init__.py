"""Arguments, classes and methods of vLLM that do not exist here: refused by name, unless they ask for nothing."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from vllm_blend.checks import closest

logger = logging.getLogger(__name__)
T = TypeVar("T")

# Reasons that arguments and methods share.
NO_POOLING = "only text generation is supported: there are no pooling models"
NO_PROFILER = "the engine has no profiler: run torch.profiler around the calls"


@dataclass(frozen=True)
class Unsupported:
    """An argument of vLLM that does not exist here.

    `default` is vLLM's, and `reason` says in one sentence why other values are refused or what to do instead. `also`
    has values that change nothing here either: the default of another release of vLLM, or what this engine does anyway.
    With `ignored`, other values cause a warning instead of an error, as in vLLM.
    """

    default: Any
    reason: str
    also: tuple[Any, ...] = ()
    ignored: bool = False

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError if `value` asks for something."""
        if value is None or value == self.default or value in self.also:
            return
        if not self.ignored:
            raise ValueError(f"{name}={value!r} is not supported: {self.reason}")
        logger.warning("%s=%r is ignored: %s", name, value, self.reason)


def accept_defaults(table: Mapping[str, Unsupported], kind: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that lets a dataclass accept the arguments in `table`, which `Unsupported.check` checks.

    An argument that is neither a field nor in the table raises TypeError, with the known name closest to it.
    """

    def decorate(cls: type[T]) -> type[T]:
        own_init = cls.__init__
        own_names = {field.name for field in fields(cls)}  # type: ignore[arg-type]

        @functools.wraps(own_init)
        def init(self: T, *args: Any, **arguments: Any) -> None:
            for name in [name for name in arguments if name not in own_names]:
                if name not in table:
                    meant = closest(name, own_names | table.keys())
                    raise TypeError(f"unknown {kind} {name!r}" + (f": did you mean {meant!r}?" if meant else ""))
                table[name].check(name, arguments.pop(name))
            own_init(self, *args, **arguments)

        cls.__init__ = init  # type: ignore[method-assign,assignment]
        return cls

    return decorate


def unsupported_class(name: str, reason: str) -> type:
    """Return a class that can be imported and tested for, but not constructed: NotImplementedError gives the reason."""
    doc = f"`{name}` of vLLM, which cannot be constructed here."
    return type(name, (), {"__init__": _refusal(name, reason), "__doc__": doc})


def refuse_methods(table: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that adds the methods in `table`, each of which raises NotImplementedError with its
    reason when it is called."""

    def decorate(cls: type[T]) -> type[T]:
        for name, reason in table.items():
            setattr(cls, name, _refusal(f"{cls.__name__}.{name}", reason))
        return cls

    return decorate


def _refusal(name: str, reason: str) -> Callable[..., None]:
    def refuse(self: object, *args: Any, **arguments: Any) -> None:
        raise NotImplementedError(f"{name} is not supported: {reason}")

    return refuse
