"""schemathesis makes requests from /openapi.json, good ones and bad ones, and checks the answers against it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.integrations.hugging_face import ROOT
from tests.integrations.servers import ServerProcess

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
WRITING = ("completions", "chat/completions", "responses", "messages", "chunks")
NUM_EXAMPLES = 30  # for each of the operations


def test_answers_are_as_described(server: ServerProcess, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color"]
    command += ["--checks", ",".join(CHECKS), "--max-examples", str(NUM_EXAMPLES), "--phases", "fuzzing"]
    command += ["--seed", "1", "--generation-database", "none", "--continue-on-failure", "--request-timeout", "60"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "SCHEMATHESIS_HOOKS": "tests.integrations.schemathesis_hooks"}
    before = len(server.log())
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    # If all requests were refused, this would say nothing of answers.
    answered = re.findall(r"method=POST path=(\S+) status=200", server.log()[before:])
    assert {*answered} >= {f"/v1/{name}" for name in WRITING}
