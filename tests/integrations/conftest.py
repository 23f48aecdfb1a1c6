"""One server process for all checks of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.servers import ServerProcess


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serve the demo model that is tuned for reuse; check at the end that nothing has failed inside the server."""
    server = ServerProcess(tmp_path_factory.mktemp("server"))
    yield server
    log = server.log()
    server.close()
    assert "Traceback" not in log, log
