"""What judges the files of deploy/ and the Dockerfile: the linters and programs of those who run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.checkout import ROOT
from tests.integrations.servers import DEADLINE, ServerProcess

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm"
KUBERNETES = ("1.29", "1.37")  # the oldest and the newest whose schemas kubernetes-validate has and the chart is for
VALUES: list[dict[str, Any]] = [
    {},
    {
        "apiKeys": {"text": "alice sk-1\nbob sk-2 weight=2\n"},
        "models": {"size": "20Gi", "storageClass": "fast", "readOnly": True},
        "store": {"size": "40Gi", "gib": 36.5, "url": "redis://redis:6379/0"},
        "args": ["--max-model-len", "16384"],
        "env": [{"name": "OMP_NUM_THREADS", "value": "4"}],
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "imagePullSecrets": [{"name": "registry"}],
    },
    {
        "apiKeys": {"existingSecret": "keys"},
        "models": {"existingClaim": "weights"},
        "store": {"enabled": False},
        "podAnnotations": {},
    },
]


def run(*command: str | Path, text: str | None = None, fails: bool = False) -> str:
    """Run a program, of this environment if it has one of that name, and return what it prints."""
    own = Path(sys.executable).parent / command[0]
    full = [str(own) if own.exists() else str(command[0]), *map(str, command[1:])]
    done = subprocess.run(full, input=text, capture_output=True, text=True, timeout=DEADLINE)
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def render(folder: Path, values: dict[str, Any], fails: bool = False) -> str:
    """Return what helm makes of the chart with these values."""
    path = folder / "values.json"
    path.write_text(json.dumps(values))
    return run("helm", "template", "release", CHART, "--values", path, fails=fails)


def healthcheck() -> list[str]:
    """Return the command by which the image is asked whether it is well."""
    found = re.search(r"HEALTHCHECK .*\\\n +CMD (\[.*\])$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert found
    command: list[str] = json.loads(found[1])
    return command


def test_the_dockerfile() -> None:
    run("hadolint", ROOT / "Dockerfile")
    bad = "FROM debian:12\nRUN cd /tmp && apt-get install curl\n"
    assert "DL3003" in run("hadolint", "-", text=bad, fails=True)


def test_the_healthcheck_asks_for_readiness(server: ServerProcess) -> None:
    name, *arguments = healthcheck()
    assert name == "python3" and "/ready" in arguments[-1]
    port = server.url.rpartition(":")[2]
    run(sys.executable, *(text.replace(":8000/", f":{port}/") for text in arguments))
    run(sys.executable, *(text.replace(":8000/", ":1/") for text in arguments), fails=True)


def test_the_compose_file(tmp_path: Path) -> None:
    schema = ("check-jsonschema", "--builtin-schema", "vendor.compose-spec")
    run(*schema, DEPLOY / "compose.yaml")
    bad = tmp_path / "compose.yaml"
    bad.write_text((DEPLOY / "compose.yaml").read_text().replace("stop_grace_period:", "stop_grace_time:"))
    assert "stop_grace_time" in run(*schema, bad, fails=True)


@pytest.mark.promtool
def test_prometheus_takes_its_configuration_and_the_alerts() -> None:
    found = run("promtool", "check", "config", DEPLOY / "prometheus.yml")
    rules = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"][0]["rules"]
    assert f"{len(rules)} rules found" in found


@pytest.mark.helm
def test_the_chart_is_sound() -> None:
    run("helm", "lint", "--strict", CHART)


@pytest.mark.helm
@pytest.mark.parametrize("values", VALUES, ids=["default", "everything", "existing"])
def test_kubernetes_takes_what_the_chart_makes(values: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rendered.yaml"
    path.write_text(text := render(tmp_path, values))
    for version in KUBERNETES:
        run("kubernetes-validate", "--strict", "--quiet", "--kubernetes-version", version, path)
    made = {each["kind"]: each for each in yaml.safe_load_all(text) if each}
    pod = made["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["livenessProbe"]["httpGet"]["path"] == container["startupProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    keys = values.get("apiKeys", {})
    assert any(text.startswith("--api-keys=") for text in container["args"]) == bool(keys)
    assert ("Secret" in made) == ("text" in keys)
    if "text" in keys:
        assert made["Secret"]["stringData"] == {"keys.txt": keys["text"]}
    assert ("--chunk-store-path=/chunks" in container["args"]) == values.get("store", {}).get("enabled", True)
    path.write_text(text.replace("readinessProbe:", "readyProbe:"))
    assert "readyProbe" in run("kubernetes-validate", "--strict", path, fails=True)


@pytest.mark.helm
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"apiKeys": {"text": "a", "existingSecret": "b"}}, "are both given"),
        ({"modle": "x"}, "modle"),
        ({"args": ["--port", 8001]}, "args"),
        ({"store": {"size": "many"}}, "size"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], problem: str, tmp_path: Path) -> None:
    assert problem in render(tmp_path, values, fails=True)


@pytest.mark.systemd_analyze
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """It has nothing against it, and thinks that little of the system is exposed to it."""
    text = (DEPLOY / "vllm-blend.service").read_text()
    unit = tmp_path / "vllm-blend.service"
    unit.write_text(text.replace("/opt/vllm-blend/bin/vllm-blend", sys.executable))
    assert run("systemd-analyze", "verify", "--man=no", unit) == ""
    run("systemd-analyze", "security", "--offline=true", "--threshold=25", unit)
    unit.write_text(unit.read_text().replace("TimeoutStopSec=", "TimeoutStopSecs="))
    assert (
        "TimeoutStopSecs"
        in subprocess.run(
            ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=DEADLINE
        ).stderr
    )
