"""guidellm puts the server under load: four requests at a time, each a stream."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.integrations.servers import NAME, REUSE_MODEL, ServerProcess

NUM_REQUESTS = 40
STREAMS = 4
OUTPUT_TOKENS = 16


def test_every_request_is_answered(server: ServerProcess, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = {
        "--backend": f"kind=openai_http,target={server.url},model={NAME}",
        "--profile": f"kind=concurrent,streams={STREAMS}",
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--data": f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}",
        "--tokenizer": f"kind=huggingface_auto,model={REUSE_MODEL}",
        "--seed": "kind=static,value=1",
        "--output": f"kind=json,path={report}",
    }
    arguments = [text for pair in options.items() for text in pair]
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS and not requests["errored"]
    assert {each["output_metrics"]["text_tokens"] for each in requests["successful"]} == {OUTPUT_TOKENS}
