"""The library that knows grammars (llguidance), imported when the first request needs it."""

from __future__ import annotations

import importlib
from typing import Any


def llguidance() -> Any:
    """Return the library. Raises ValueError, as for any request that cannot be served, saying how to install it."""
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise ValueError(
            "structured_outputs needs the package llguidance: run pip install 'vllm-blend[structured]'"
        ) from error
