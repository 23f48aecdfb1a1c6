"""Tells users of another distribution that owns an import name of ours: which one is imported is an accident then."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version

IMPORT_NAMES = ("vllm", "lmcache_vllm")  # of vllm_blend/compat


def foreign_distributions() -> dict[str, str]:
    """Installed distributions called like our import names, with their versions."""
    found = {}
    for name in IMPORT_NAMES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def warn_of_foreign_distributions() -> None:
    for name, release in foreign_distributions().items():
        warnings.warn(
            f"the distribution {name} {release} is installed beside vllm-blend, and both provide the import name "
            f"{name!r}: what `import {name}` gives depends on which was installed last. Keep one of the two: "
            f"`pip uninstall {name}` and then install vllm-blend again (the uninstallation removes shared files), "
            "or use vllm-blend in an environment of its own",
            stacklevel=3,
        )
