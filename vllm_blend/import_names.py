"""Warn users who installed the import names `vllm` and `lmcache_vllm` if another package provides one of them."""

from __future__ import annotations

import os
import sys
import warnings
from importlib.machinery import PathFinder

IMPORT_NAMES = ("vllm", "lmcache_vllm")
FOLDER = os.path.join(os.path.dirname(os.path.realpath(__file__)), "compat")  # on the path if the names are installed


def shadowed_names() -> dict[str, str]:
    """Return the import names that another package provides, with its file; nothing if this package's are not
    installed."""
    if FOLDER not in map(os.path.realpath, sys.path):
        return {}
    found = {}
    for name in IMPORT_NAMES:
        spec = PathFinder.find_spec(name)
        if spec is not None and not os.path.realpath(spec.origin or "").startswith(FOLDER + os.sep):
            found[name] = spec.origin or str(list(spec.submodule_search_locations or []))
    return found


def warn_of_shadowed_names() -> None:
    for name, origin in shadowed_names().items():
        warnings.warn(
            f"`import {name}` gives {origin} and not vllm-blend, because another package of that name comes first on "
            "Python's path. To use both, write `from vllm_blend import ...`, and install vllm-blend with "
            f"VLLM_BLEND_ALIAS=0, which ends this warning. To use `import {name}` for vllm-blend, run "
            f"`pip uninstall {name}`",
            stacklevel=3,
        )
