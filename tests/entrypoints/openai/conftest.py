"""One server, and one offline engine to compare it with, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.engines import new_llm
from tests.entrypoints.openai.servers import TestServer, engine_args
from vllm_blend import LLM


@pytest.fixture(scope="package")
def server() -> Iterator[TestServer]:
    server = TestServer()
    yield server
    server.close()


@pytest.fixture(scope="package")
def offline() -> Iterator[LLM]:
    arguments = engine_args()
    llm = new_llm(arguments.pop("model"), **arguments)
    yield llm
    llm.shutdown()
