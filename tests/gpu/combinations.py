"""Prints the attention backends that work on this GPU, with each dtype they take: `backend dtype`, one pair a line."""

from __future__ import annotations

import sys

from tests.tolerances import TOLERANCES
from vllm_blend.attention.registry import KINDS, make_backend
from vllm_blend.devices import resolve_device, resolve_dtype

if __name__ == "__main__":
    device = resolve_device("cuda")
    for dtype in TOLERANCES:
        found = []
        for name in KINDS:
            try:
                make_backend(name, device, resolve_dtype(dtype, None, device), head_dim=64)
            except (ImportError, ValueError, RuntimeError) as reason:
                print(f"left out: {name} {dtype}: {reason}", file=sys.stderr)
            else:
                found.append(name)
        for name in found:
            print(name, dtype)
