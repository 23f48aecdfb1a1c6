"""`EngineArgs`: the flat arguments that users give, made from the declared options, and the configuration they make."""

from __future__ import annotations

import argparse
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_blend.checks import check_field_types
from vllm_blend.command_line import add_flags, given
from vllm_blend.config import EngineConfig
from vllm_blend.executor.backends import choose_backend
from vllm_blend.features import FEATURES, check_cache_dtype, check_exclusions, check_ranks
from vllm_blend.options import Option, OptionGroup
from vllm_blend.unsupported import accept_defaults
from vllm_blend.unsupported.engine_args import UNSUPPORTED_ENGINE_ARGS

_ROOTS: tuple[type[OptionGroup], ...] = (EngineConfig, *FEATURES)
OPTION_GROUPS = tuple(group for root in _ROOTS for group in root.groups())
OPTIONS: dict[str, Option] = {option.name: option for group in OPTION_GROUPS for option in group.options()}

F = TypeVar("F", bound=Callable[..., Any])


def show_options(function: F) -> F:
    """Decorate a function whose `**engine_args` are options: `inspect.signature`, and with it notebooks and editors,
    shows each option with its type and default."""
    own = inspect.signature(function)
    shown = [each for each in own.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    shown += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=option.type)
        for name, option in OPTIONS.items()
        if name not in own.parameters
    ]
    function.__dict__["__signature__"] = own.replace(parameters=shown)
    return function


def _complete(args: Any) -> None:
    """Fill in defaults for None, take paths as text, and check every value by its declared type."""
    for name, option in OPTIONS.items():
        value = getattr(args, name)
        if value is None and option.none_means_default:
            setattr(args, name, option.new_default())
        elif isinstance(value, os.PathLike):
            setattr(args, name, os.fspath(value))
    check_field_types(args)


def _field(option: Option) -> Any:
    if isinstance(option.default, list):
        return field(default_factory=option.new_default, repr=option.shown)
    return field(default=option.default, repr=option.shown)


if TYPE_CHECKING:

    @dataclass(init=False)
    class _Options:
        """What a type checker needs to know: options are declared elsewhere, and checked when they are given."""

        def __init__(self, model: str, tokenizer: Any = None, **options: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...
else:
    _Options = make_dataclass(
        "EngineArgs",  # as errors call it
        [(option.name, option.type, _field(option)) for option in OPTIONS.values()],
        namespace={"__post_init__": _complete},
    )


@accept_defaults(UNSUPPORTED_ENGINE_ARGS, "engine argument")
class EngineArgs(_Options):
    """vLLM's engine arguments, and those of this engine's own features: docs/options.md lists all of them.

    vLLM's arguments that do not exist here may be None or have vLLM's default; other values are a ValueError with the
    reason (see `UNSUPPORTED_ENGINE_ARGS`). Unknown names are a TypeError, values of another type than the declared one
    a ValueError.
    """

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for every argument, named as in vLLM: `--attention-backend`, `--no-enable-prefix-caching`."""
        add_flags(parser, OPTION_GROUPS)
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> EngineArgs:
        """Return the arguments of a parsed command line; flags that are not the engine's are ignored."""
        return cls(**given(namespace, [*OPTIONS]))

    def create_engine_config(self) -> EngineConfig:
        """Return the configuration. Raises ValueError naming the argument and the fix, and ImportError naming the
        extra that must be installed."""
        values = vars(self)
        features = tuple(kind.from_values(values) for kind in FEATURES)
        check_exclusions(features)
        config = EngineConfig.from_values(values, features=features)
        check_ranks(config)
        check_cache_dtype(config)
        choose_backend(config)  # whose errors are raised before anything is loaded
        return config
