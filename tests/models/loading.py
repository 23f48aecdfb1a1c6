"""What loading a model takes at its peak, measured in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CLEAR_REFS = Path("/proc/self/clear_refs")
needs_peak = pytest.mark.skipif(not CLEAR_REFS.exists(), reason="needs Linux' account of a process's memory")
_PEAK = """
import sys
import torch
from vllm_blend.models import stored
from vllm_blend.models.loader import load_hf_config, load_model

def status(name):
    [line] = [line for line in open("/proc/self/status") if line.startswith(name)]
    return int(line.split()[1]) * 1024

stored.READ_AT_ONCE = int(sys.argv[2])
config = load_hf_config(sys.argv[1])
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = status("VmRSS")
model = load_model(config, sys.argv[1], torch.float32, "cpu", max_position=64, keeps_int4=True)
print(status("VmHWM") - before)
"""


def peak_of_loading(path: Path, read_at_once: int) -> int:
    """Return by how many bytes the process grows at most while it loads a model in float32."""
    command = [sys.executable, "-c", _PEAK, str(path), str(read_at_once)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
