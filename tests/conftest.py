"""The options of a test run, the marker of tests that say nothing about another device than the CPU, and hypothesis on
machines of any speed."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests import kept, memory, run_summary, settings, tolerances
from tests.settings import Settings


def pytest_addoption(parser: pytest.Parser) -> None:
    default = Settings()
    group = parser.getgroup("engines", "where tests run their engines")
    group.addoption("--device", default=default.device, choices=["cpu", "cuda"])
    group.addoption("--dtype", default=default.dtype, choices=sorted(tolerances.TOLERANCES))
    group.addoption("--attention-backend", default=default.attention_backend, help="as LLM's attention_backend")


def pytest_configure(config: pytest.Config) -> None:
    # Engines are kept for other tests, and a prefix cache goes through all of its pages before it uses one again.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "0.125")
    settings.use(Settings(*(config.getoption(name) for name in ("device", "dtype", "attention_backend"))))
    settings.run_as_without_bfloat16()
    if importlib.util.find_spec("hypothesis") is not None:  # the environment of tests/colbert has none
        _let_hypothesis_take_its_time()


def _let_hypothesis_take_its_time() -> None:
    """For all tests that do not say otherwise: a busy machine draws examples slowly, which is no error."""
    import hypothesis

    slow_machine = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
    hypothesis.settings.register_profile("vllm-blend", hypothesis.settings.default, **slow_machine)
    hypothesis.settings.load_profile("vllm-blend")


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[None]:
    """Processes that engines of this process start come from a fork server. With a GPU, and where a process cannot take
    in another one's child, they begin as anywhere else."""
    if sys.platform != "linux" or settings.current().device != "cpu" or importlib.util.find_spec("zmq") is None:
        yield
        return
    from tests.fork_server import ForkServer  # the environment of tests/colbert has no engine
    from vllm_blend.engine.process import launch
    from vllm_blend.executor import multiproc

    server = ForkServer()
    with pytest.MonkeyPatch.context() as patch:
        for module in (launch, multiproc):
            patch.setattr(module, "start_module", server.start_module)
        yield
    server.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if settings.current().device != "cpu":
        left_out = [item for item in items if item.get_closest_marker("cpu_only")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.suffix == ".ipynb":  # it has engines in a process of its own
        kept.drop_all()


def pytest_collection_finish() -> None:
    memory.settle()


def pytest_runtest_logfinish() -> None:
    memory.free_dropped()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    if "seen" in getattr(node, "workeroutput", {}):  # else it crashed, which is reported
        run_summary.add_worker(node.workeroutput["seen"])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # the process that started this one tells
        session.config.workeroutput["seen"] = run_summary.of_this_process()
    elif run_summary.faults() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in run_summary.lines():
        terminalreporter.write_line(line)
    for fault in run_summary.faults():
        terminalreporter.write_line(f"FAILED: {fault}", red=True)
