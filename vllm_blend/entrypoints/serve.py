"""`vllm-blend serve`: an OpenAI server in which every passage is reusable.

    vllm-blend serve inputs/demo-model-reuse
    vllm-blend serve Qwen/Qwen3-8B --port 8001 --max-model-len 16384 --api-keys keys.txt
    vllm-blend serve --config server.yaml

Flags have vLLM's names. A YAML file given by --config has them as keys, with dashes or underscores; the command line
overrides it. Blending is on unless --no-enable-blending is given. docs/server.md explains the endpoints. The exit
status is 0 after SIGTERM or SIGINT, also while the model loads, and 2 for bad input, before any work.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

from vllm_blend.checks import closest
from vllm_blend.command_line import BAD_INPUT, CommandParser, add_flags, given
from vllm_blend.engine_args import OPTION_GROUPS, OPTIONS, EngineArgs
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.vllm_flags import (
    SHORT_NAMES,
    UNSUPPORTED,
    add_unsupported_flags,
    check_unsupported_flags,
)
from vllm_blend.unsupported.engine_args import UNSUPPORTED_ENGINE_ARGS
from vllm_blend.unsupported.environment import apply_environment
from vllm_blend.unsupported.server_flags import UNSUPPORTED_SERVER_FLAGS

SERVER_OPTIONS = {option.name: option for option in ServerOptions.options()}
# Engine options whose default is another one over HTTP than offline.
DEFAULTS: dict[str, Any] = {"enable_blending": True, "max_logprobs": 20}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    try:
        with _ending_on_signals():
            engine_args, options = parse(list(sys.argv[1:] if argv is None else argv))
            return _load_server()(engine_args, options)
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"vllm-blend serve: error: {error}", file=sys.stderr)
        return BAD_INPUT


@contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGINT end the command with status 0 while uvicorn does not look at them: what has been started,
    such as a process that loads the model, is ended on the way out."""
    if threading.current_thread() is not threading.main_thread():  # elsewhere Python sets no handlers
        yield
        return

    def end(number: int, _: object) -> None:
        print(f"vllm-blend serve: ends, as it got {signal.Signals(number).name}", file=sys.stderr)
        sys.exit(0)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _load_server() -> Callable[[EngineArgs, ServerOptions], int]:
    """Return what runs the server. Raises ImportError that says what to install."""
    try:
        from vllm_blend.entrypoints.openai.run import run_server
    except ModuleNotFoundError as error:
        raise ImportError(f"the server needs {error.name}: run pip install 'vllm-blend[server]'") from error
    return run_server


def parse(argv: list[str]) -> tuple[EngineArgs, ServerOptions]:
    """Return what a command line, and the file that its --config names, ask for.

    Raises ValueError that names the option. A line that argparse cannot read ends the program with status 2.
    """
    parser = make_parser()
    found = parser.parse_known_args(argv)[0]
    namespace = argparse.Namespace()
    if hasattr(found, "config"):
        namespace = parser.parse_args(config_arguments(Path(found.config)), namespace)
    namespace, unknown = parser.parse_known_args(argv, namespace)
    if unknown:
        raise ValueError(explain_unknown(unknown[0]))
    check_unsupported_flags(namespace)
    values = DEFAULTS | given(namespace, [*OPTIONS])
    if "model" not in values:
        raise ValueError("there is no model: give a model directory or a Hugging Face id, vllm-blend serve MODEL")
    server_values = given(namespace, [*SERVER_OPTIONS])
    if "allowed_origins" in server_values:
        server_values["allowed_origins"] = _read_list(server_values["allowed_origins"])
    server_values = apply_environment(server_values, os.environ)
    return EngineArgs(**values), ServerOptions(**server_values)


def _read_list(given: list[str]) -> list[str]:
    """Return a list that was given as several arguments, or, as vLLM has it, as one that is JSON."""
    if len(given) == 1 and given[0].startswith("["):
        with suppress(json.JSONDecodeError):
            return list(map(str, json.loads(given[0])))
    return given


def make_parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vllm-blend serve",
        usage="vllm-blend serve MODEL [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", default=argparse.SUPPRESS, metavar="FILE", help="YAML file of options; flags override it"
    )
    add_flags(
        parser,
        (ServerOptions, *OPTION_GROUPS),
        positional="model",
        defaults=DEFAULTS,
        short_names=SHORT_NAMES,
    )
    add_unsupported_flags(parser)
    return parser


def config_arguments(path: Path) -> list[str]:
    """Return the options of a YAML file as a command line has them. Raises ValueError naming the key."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"config={str(path)!r} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"config={str(path)!r} must hold a mapping of options, such as `port: 8001`")
    arguments: list[str] = []
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if not any(name in known for known in (OPTIONS, SERVER_OPTIONS, UNSUPPORTED)):
            raise ValueError(f"config={str(path)!r}: {explain_unknown(str(key))}")
        arguments += _flag(name.replace("_", "-"), value)
    return arguments


def _flag(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={json.dumps(value) if isinstance(value, Mapping) else value}"]


def explain_unknown(argument: str) -> str:
    """Return what to say about an option that does not exist."""
    name = argument.partition("=")[0].lstrip("-").replace("-", "_")
    reasons = {each: argument.reason for each, argument in UNSUPPORTED_ENGINE_ARGS.items()} | UNSUPPORTED_SERVER_FLAGS
    if (flag := name.removeprefix("no_")) in reasons:
        return f"{argument} is not supported: {reasons[flag]}"
    meant = closest(name, [*OPTIONS, *SERVER_OPTIONS])
    hint = f": did you mean --{meant.replace('_', '-')}?" if meant is not None else "; see vllm-blend serve --help"
    return f"unknown option {argument}{hint}"
