"""`vllm-blend COMMAND ...`: the commands, each loaded only when it is used. `python -m vllm_blend` does the same."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from vllm_blend import __version__
from vllm_blend.checks import closest

# Name -> the module whose main(arguments) it is (an exit status, or None for 0), and what it does.
COMMANDS = {
    "serve": (
        "vllm_blend.entrypoints.serve",
        "serve a model to OpenAI's clients over HTTP",
    ),
    "check-model": (
        "vllm_blend.quality.check_model",
        "find how little of a context a model must recompute to keep its answers",
    ),
    "finetune": (
        "vllm_blend.finetune.command",
        "train a model until it answers as well from reused chunks as from full prefill",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    width = max(map(len, COMMANDS)) + 2
    lines = [f"  {name:<{width}}{text}" for name, (_, text) in COMMANDS.items()]
    parser = argparse.ArgumentParser(
        prog="vllm-blend",
        usage="vllm-blend COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["commands:", *lines, "", "`vllm-blend COMMAND --help` explains each."]),
    )
    parser.add_argument("--version", action="version", version=f"vllm-blend {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those below")
    given = list(sys.argv[1:] if argv is None else argv)
    meant = closest(given[0], COMMANDS) if given and given[0] not in COMMANDS else None
    if meant is not None:
        parser.error(f"there is no command {given[0]!r}: did you mean {meant!r}?")
    args = parser.parse_args(given[:1])
    return importlib.import_module(COMMANDS[args.command][0]).main(given[1:]) or 0


if __name__ == "__main__":
    sys.exit(main())
