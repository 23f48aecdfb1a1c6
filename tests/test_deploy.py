"""The files of deploy/ and the Dockerfile ask for flags, metrics and files that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.checkout import ROOT
from vllm_blend.entrypoints.openai.metrics.page import metrics_page
from vllm_blend.entrypoints.serve import parse

DEPLOY = ROOT / "deploy"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def entrypoint() -> list[str]:
    """Return the flags that the image gives itself."""
    found = re.search(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert found
    command: list[str] = json.loads(found[1])
    assert command[:2] == ["vllm-blend", "serve"]
    return command[2:]


def compose() -> dict[str, Any]:
    """Return compose.yaml with its variables at their defaults."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text())
    assert "$" not in re.sub(r"^#.*", "", text, flags=re.MULTILINE)
    loaded: dict[str, Any] = yaml.safe_load(text)
    return loaded


def test_the_image_gets_what_it_copies() -> None:
    """All that the Dockerfile copies is there, and let through by .dockerignore; its folders belong to its user."""
    copied = [
        name for line in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]
    ]
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in rules, name
    kept = [rule[1:] for rule in rules if rule[0] == "!"]
    assert rules[0] == "*" and not [name for name in kept if name not in copied]
    assert {"setup.py", "vllm_blend", "csrc"} <= {*copied}
    [user] = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.MULTILINE)
    assert f"--uid {user} " in DOCKERFILE and user != "0"


def test_the_composed_server_has_flags_that_exist() -> None:
    loaded = compose()
    server = loaded["services"]["server"]
    args, options = parse([*entrypoint(), *server["command"]])
    assert options.host == "0.0.0.0"
    assert args.chunk_store_url == "redis://redis:6379/0" and "redis" in loaded["services"]
    assert [options.api_keys] == [f"/run/secrets/{name}" for name in server["secrets"]]
    volumes = [volume.rpartition(":")[::2] for volume in server["volumes"]]
    folders = {target: source for source, target in volumes}
    assert args.chunk_store_path in folders and Path(args.model).parts[1] == "models"
    assert (DEPLOY / folders["/models"] / Path(args.model).name / "config.json").is_file()
    for kind in ("configs", "secrets"):
        for each in loaded[kind].values():
            assert (DEPLOY / each["file"]).exists() or each["file"] == "keys.txt"
    published = [port for service in loaded["services"].values() for port in service.get("ports", [])]
    assert published and all(port.startswith("127.0.0.1:") for port in published)


def test_the_units_server_has_flags_that_exist() -> None:
    args, options = parse(["--config", str(DEPLOY / "server.yaml")])
    unit = (DEPLOY / "vllm-blend.service").read_text()
    assert "serve --config /etc/vllm-blend/server.yaml\n" in unit
    assert args.model.startswith("/var/lib/vllm-blend/") and "StateDirectory=vllm-blend\n" in unit
    assert args.chunk_store_path is not None
    assert args.chunk_store_path.startswith("/var/cache/vllm-blend/") and "CacheDirectory=vllm-blend\n" in unit
    assert options.api_keys == "/etc/vllm-blend/keys.txt"


def test_time_to_stop_is_what_the_documentation_asks_for() -> None:
    asked = re.search(r"Give a container (\d+) seconds to stop", (ROOT / "docs" / "operations.md").read_text())
    assert asked
    seconds = int(asked[1])
    values = yaml.safe_load((DEPLOY / "helm" / "values.yaml").read_text())
    assert values["terminationGracePeriodSeconds"] == seconds
    assert compose()["services"]["server"]["stop_grace_period"] == f"{seconds}s"
    assert f"TimeoutStopSec={seconds}\n" in (DEPLOY / "vllm-blend.service").read_text()


def test_alerts_name_metrics_and_labels_that_exist() -> None:
    loaded = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
    expressions = " ".join(rule["expr"] for group in loaded["groups"] for rule in group["rules"])
    metrics = metrics_page()
    labels = dict(re.findall(r"(?m)^\| `(\w+)` \| (`.*)\|$", metrics))
    names = {name.removesuffix("_bucket") for name in re.findall(r"\bvllm(?:_blend)?:\w+", expressions)}
    assert len(names) >= 8 and [name for name in names if f"| `{name}` |" not in metrics] == []
    for label, values in re.findall(r'{(\w+)=~"([^"]+)"', expressions):
        assert [value for value in values.split("|") if f"`{value}`" not in labels[label]] == []


def test_prometheus_asks_the_composed_server() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    [job] = config["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    name, _, port = target.partition(":")
    assert name in compose()["services"] and f"EXPOSE {port}\n" in DOCKERFILE
