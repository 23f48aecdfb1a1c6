"""OpenMP's threads must not burn the cores that other programs use, however the engine is started."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from tests.checkout import ROOT
from tests.engine.engines import new_llm, tiny_model
from vllm_blend.openmp import VARIABLES
from vllm_blend.worker import worker

MEASURE = """
import os, resource, subprocess, sys
cores = sorted(os.sched_getaffinity(0))[:2]
os.sched_setaffinity(0, cores)
{imports}
from vllm_blend.openmp import limit_spinning

def cpu_seconds():
    weights = torch.randn(64, 576, 576)
    x = torch.randn(8, 576)
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(4):
        for weight in weights:
            x = torch.nn.functional.silu(x @ weight) * 0.1
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

torch.set_num_threads(2)
busy = [subprocess.Popen([sys.executable, "-S", "-c", f"import os; os.sched_setaffinity(0, [{{core}}])\\nwhile 1: 1"])
        for core in cores]
try:
    first = cpu_seconds()
    limit_spinning()
    print(first, cpu_seconds())
finally:
    for process in busy:
        process.kill()
"""
PACKAGE_FIRST, TORCH_FIRST = "import vllm_blend, torch", "import torch, vllm_blend"


def cpu_seconds(imports: str) -> tuple[float, float]:
    """Return the CPU time of some products in a process whose cores are busy, before and after `limit_spinning`."""
    environment = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "OMP_NUM_THREADS")}
    command = [sys.executable, "-c", MEASURE.format(imports=imports)]
    ran = subprocess.run(command, env=environment | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, check=True)
    before, after = map(float, ran.stdout.split())
    return before, after


@pytest.mark.cpu_only
@pytest.mark.skipif(sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_do_not_spin_beside_busy_programs() -> None:
    """Torch alone spins. The package stops that, whether torch was imported before it or after."""
    spinning, limited = cpu_seconds(TORCH_FIRST)
    assert limited < 0.5 * spinning
    assert max(cpu_seconds(PACKAGE_FIRST)) < 0.5 * spinning


@pytest.mark.cpu_only
def test_an_engine_on_a_cpu_limits_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Mock()
    monkeypatch.setattr(worker, "limit_spinning", calls)
    new_llm(tiny_model("llama"), max_model_len=32)
    calls.assert_called_once_with()
