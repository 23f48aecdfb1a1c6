"""LangChain's stuff chain of langchain-classic with langchain-openai, as examples/langchain_stuff.py uses it."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.integrations.hugging_face import ROOT
from tests.integrations.servers import DEADLINE, ServerProcess


def test_passages_of_an_unmodified_chain_are_reused(server: ServerProcess) -> None:
    """The third time a passage is seen it is reused; the answers stay right."""
    command = [sys.executable, "examples/langchain_stuff.py", server.base_url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    for answer in ("Wiossnea? Brurfiaria", "Kaimsha Piaka found? Jixstai Company", "Niaceal? Biasschind"):
        assert f"{answer}\n" in done.stdout
    counts = [(int(all_), int(cached)) for all_, cached in re.findall(r"(\d+) prompt tokens, (\d+)", done.stdout)]
    assert len(counts) == 4 and counts[0][1] == 0
    assert all(cached > all_ / 2 for all_, cached in counts[2:])
