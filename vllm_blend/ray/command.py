"""What scripts/serve_ray.sh runs: Ray Serve's `serve run`, after a look at the options.

    python -m vllm_blend.ray.command configs/ray_serve.yaml
    python -m vllm_blend.ray.command model=inputs/demo-model-reuse replicas=2

`serve run` itself answers a wrong option by a trace, and one in a file by four attempts in a cluster that it starts for
that, after which it waits for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from vllm_blend.command_line import BAD_INPUT
from vllm_blend.ray.app import check_app

TARGET = "vllm_blend.ray.app:build"


def is_file(arguments: Sequence[str]) -> bool:
    """Return whether arguments name a file, and not options."""
    return len(arguments) == 1 and ("=" not in arguments[0] or Path(arguments[0]).is_file())


def applications(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """Return the options of each of this package's applications that arguments name: NAME=VALUE, or a YAML file of Ray
    Serve. What else is in the file is Ray Serve's to check.

    Raises OSError or ValueError for a file that cannot be read.
    """
    if not is_file(arguments):
        pairs = [argument.partition("=") for argument in arguments]
        return [{name: value for name, _, value in pairs}]
    [file] = arguments
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{file} cannot be read as YAML: {' '.join(str(error).split())}") from error
    given = content.get("applications") if isinstance(content, dict) else None
    if not isinstance(given, list):
        raise ValueError(f"{file} has no list of applications: see configs/ray_serve.yaml")
    ours = [each for each in given if isinstance(each, dict) and each.get("import_path") == TARGET]
    return [dict(each.get("args") or {}) for each in ours]


def main(arguments: Sequence[str]) -> int:
    """Check the options, then run `serve run`, which does not return before it is stopped."""
    try:
        for options in applications(arguments):
            check_app(options)
    except (OSError, ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    from ray.serve.scripts import cli

    cli(["run", *([] if is_file(arguments) else [TARGET]), *arguments], prog_name="serve")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
