"""A process of `vllm-blend serve` on a real socket, for other people's clients."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.integrations.hugging_face import ROOT

REUSE_MODEL = str(ROOT / "inputs" / "demo-model-reuse")
NAME = "demo"  # what requests call the model
QUESTION = "What does Tulmaris Works make?"
DEADLINE = 120.0  # seconds: no machine is so slow


def as_prompt(question: str) -> str:
    """Return what the model's chat template makes of a question, but for the first token."""
    return f"Question: {question}\nAnswer:"


# A small model likes to go on with spaces, and with properties of its own.
STRUCTURED_OUTPUTS = {"disable_any_whitespace": True, "disable_additional_properties": True}
DEMO_OPTIONS = {
    "--blend-encoding-context": "page",  # the template puts nothing before the first passage
    "--tool-call-parser": "hermes",  # the model's chat template shows no format of calls
    "--structured-outputs-config": json.dumps(STRUCTURED_OUTPUTS),
}


class ServerProcess:
    """A server, by default of the demo model that is tuned for reuse. Raises RuntimeError with its log if it does not
    start."""

    def __init__(
        self,
        folder: Path,
        model: str = REUSE_MODEL,
        options: Mapping[str, str] = DEMO_OPTIONS,
        flags: Sequence[str] = (),
    ) -> None:
        """Start it, with its log in `folder`, and with further flags."""
        self._log = folder / "server.log"
        common = {
            "--port": "0",
            "--device": "cpu",
            "--dtype": "float32",
            "--served-model-name": NAME,
            "--num-gpu-blocks-override": "512",
        }
        options = {**common, **options}
        arguments = [text for pair in options.items() for text in pair]
        command = [sys.executable, "-m", "vllm_blend", "serve", model, *arguments, *flags]
        with self._log.open("w") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)
        try:
            self.url = self._wait()
        except BaseException:
            self._process.kill()
            raise

    @property
    def base_url(self) -> str:
        """Return the address that clients of OpenAI's API take."""
        return f"{self.url}/v1"

    def log(self) -> str:
        return self._log.read_text()

    def tokenize(self, text: str) -> list[int]:
        """Return the token ids of a text, without those that begin or end a prompt."""
        body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
        request = urllib.request.Request(f"{self.url}/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return [int(token) for token in json.load(answer)["tokens"]]

    def close(self) -> None:
        """Stop the server as SIGTERM does. Raises RuntimeError if it was gone before, or did not end well."""
        try:
            self._process.send_signal(signal.SIGTERM)
            status = self._process.wait(DEADLINE)
        finally:
            self._process.kill()
        if status != 0:
            raise RuntimeError(f"the server ended with status {status}:\n{self.log()}")

    def _wait(self) -> str:
        """Return the server's address, as soon as it answers there."""
        stop = time.monotonic() + DEADLINE
        while time.monotonic() < stop and self._process.poll() is None:
            found = re.search(r"http://127\.0\.0\.1:\d+", self.log())
            if found and _is_healthy(found[0]):
                return found[0]
            time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{self.log()}")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=DEADLINE) as answer:
            return bool(answer.status == 200)
    except urllib.error.URLError:
        return False
