"""docs/options.md, made from the declared options: python -m vllm_blend.options_page > docs/options.md"""

from __future__ import annotations

from vllm_blend.checks import describe
from vllm_blend.engine_args import OPTION_GROUPS
from vllm_blend.options import Option, OptionGroup

_INTRODUCTION = """# Engine options

Each of these is a keyword of `LLM(...)` and of `EngineArgs(...)`, and a flag of programs that call
`EngineArgs.add_cli_args`: `max_model_len` is `--max-model-len`. A value of another type than the one in the table is an
error, and so is an unknown name. vLLM's other arguments may be given at their defaults (docs/integrations.md).

This page is made from the declarations (`vllm_blend/config.py`, `vllm_blend/kv_store/options.py`,
`vllm_blend/features/*/config.py`) by
`python -m vllm_blend.options_page > docs/options.md`.
"""


def options_page() -> str:
    """Return the page: a table for each group of options."""
    return "\n".join([_INTRODUCTION, *map(_section, OPTION_GROUPS)])


def _section(group: type[OptionGroup]) -> str:
    rows = "".join(_row(option) for option in group.options())
    return f"## {group.title}\n\n| option | value | default | what it says |\n|---|---|---|---|\n{rows}"


def _row(option: Option) -> str:
    default = "must be given" if option.is_required else f"`{option.default!r}`"
    return f"| `{option.name}` | {describe(option.type)} | {default} | {option.help.replace('|', chr(92) + '|')} |\n"


if __name__ == "__main__":
    print(options_page(), end="")
