"""An application for Ray Serve: an ingress in front of replicas of the engine.

    serve run configs/ray_serve.yaml
    serve run vllm_blend.ray.app:build model=inputs/demo-model-reuse replicas=2

    from ray import serve
    from vllm_blend.ray import build_app

    serve.run(build_app({"model": "Qwen/Qwen3-8B", "max_model_len": 16384}, replicas=4))

docs/ray.md explains what clients see, and what differs from `vllm-blend serve`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from vllm_blend.checks import closest, require
from vllm_blend.devices import resolve_device
from vllm_blend.engine.setup import resolve_max_model_len
from vllm_blend.engine_args import OPTIONS, EngineArgs
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.serve import DEFAULTS, SERVER_OPTIONS, explain_unknown
from vllm_blend.executor.backends import choose_backend
from vllm_blend.features.kv_events.config import KVEventsConfig
from vllm_blend.models.loader import load_hf_config
from vllm_blend.models.sharing import check_ranks_fit
from vllm_blend.options import Option
from vllm_blend.ray.options import RayOptions
from vllm_blend.unsupported.environment import apply_environment

logger = logging.getLogger(__name__)

RAY_OPTIONS = {option.name: option for option in RayOptions.options()}
_ALL = {**OPTIONS, **SERVER_OPTIONS, **RAY_OPTIONS}
# Options of the server for what Ray Serve does itself, and where that is set.
_OF_RAY = {
    **dict.fromkeys(("host", "port"), "http_options in the YAML, or serve.start(http_options=...)"),
    "uds": "Ray Serve listens on TCP: leave it out",
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile"), "a proxy in front of Ray Serve"),
    "root_path": "route_prefix in the YAML, or serve.run(route_prefix=...)",
}
_FILES = ("tokenizer", "api_keys", "chat_template")  # options that may name a file, or hold something else


@dataclass(frozen=True)
class AppConfig:
    """All options of an application, checked."""

    engine: EngineArgs
    server: ServerOptions
    ray: RayOptions


def read_options(options: Mapping[str, Any]) -> AppConfig:
    """Return the options of an application, by the names of the engine's, the server's and Ray's, with dashes or
    underscores. Values that are text, as on a command line, are read by the options' types.

    Raises ValueError or TypeError that names the option, before Ray has started anything.
    """
    values: dict[str, Any] = {}
    for key, value in options.items():
        name = str(key).replace("-", "_")
        require(name not in values, f"{name} is given twice: leave one of them out")
        values[name] = value
    for name, value in values.items():
        if name in _OF_RAY:
            raise ValueError(f"{name} is an option of `vllm-blend serve` alone; with Ray Serve: {_OF_RAY[name]}")
        if name not in _ALL:
            meant = closest(name, [*RAY_OPTIONS])
            raise ValueError(f"unknown option {name}: did you mean {meant}?" if meant else explain_unknown(name))
        if isinstance(value, str):
            values[name] = _from_text(value, _ALL[name])
    require("model" in values, "there is no model: give model, a model directory or a Hugging Face id")
    if Path(str(values["model"])).exists():  # workers run in another folder
        values.setdefault("served_model_name", [str(values["model"])])
        values["model"] = str(Path(values["model"]).resolve())
    for name in _FILES:
        if isinstance(values.get(name), str) and _is_path(values[name]):
            values[name] = str(Path(values[name]).absolute())
    if isinstance(values.get("chunk_store_path"), str):
        values["chunk_store_path"] = str(Path(values["chunk_store_path"]).absolute())
    engine = EngineArgs(**DEFAULTS | {name: value for name, value in values.items() if name in OPTIONS})
    server_values = {name: value for name, value in values.items() if name in SERVER_OPTIONS}
    server = ServerOptions(**apply_environment(server_values, os.environ))
    ray = RayOptions(**{name: value for name, value in values.items() if name in RAY_OPTIONS})
    return AppConfig(engine, server, ray)


def check_app(options: Mapping[str, Any], replicas: int | None = None) -> AppConfig:
    """Return the options of `build_app` as it uses them, with the number of GPUs. It needs no Ray.

    Raises ValueError or TypeError that names the option.
    """
    given_options = dict(options)
    if replicas is not None:
        require("replicas" not in given_options, "replicas is given twice: leave one of them out")
        given_options["replicas"] = replicas
    config = read_options(given_options)
    engine_config = config.engine.create_engine_config()  # what is wrong with it is said here, not by a worker
    count = "replicas" if config.ray.max_replicas is None else "max_replicas"
    engine_config.feature(KVEventsConfig).check_engines(count, config.ray.most_replicas)
    model = engine_config.model
    if Path(model.model).exists():
        hf_config = load_hf_config(model.model, model.revision, model.trust_remote_code, model.hf_overrides)
        resolve_max_model_len(model, hf_config)
        check_ranks_fit(hf_config, engine_config.tensor_parallel_size)
    gpus, size = config.ray.num_gpus, engine_config.tensor_parallel_size
    if gpus is None:
        gpus = float(size if resolve_device(config.engine.device).type == "cuda" else 0)
    require(
        choose_backend(engine_config) != "ray" or gpus in (0, size),
        f"num_gpus={gpus:g} with distributed_executor_backend='ray': each of the {size} ranks has a GPU, or none has: "
        f"give {size} or 0, or leave it out",
    )
    require(
        choose_backend(engine_config) != "ray" or config.ray.num_cpus + gpus > 0,
        "num_cpus=0 with distributed_executor_backend='ray': Ray has no group in which nothing is reserved for the "
        "replica: give num_cpus=1",
    )
    return replace(config, ray=replace(config.ray, num_gpus=gpus))


def build_app(options: Mapping[str, Any], replicas: int | None = None) -> Any:
    """Return the application, for `serve.run`; `build` is for YAML files and `serve run`. `options` are those of
    `read_options`; `replicas` may be among them.

    Raises ValueError or TypeError that names the option, and ImportError that says what to install.
    """
    config = check_app(options, replicas)
    try:
        from vllm_blend.ray.deployments import make_application
    except ModuleNotFoundError as error:
        raise ImportError(f"Ray Serve needs {error.name}: run pip install 'vllm-blend[ray]'") from error
    if config.ray.most_replicas > 1 and not (config.engine.chunk_store_path or config.engine.chunk_store_url):
        logger.warning(
            "%d replicas share no store: each encodes passages for itself; give chunk_store_path or chunk_store_url",
            config.ray.most_replicas,
        )
    return make_application(config.engine, config.server, config.ray)


def build(options: dict[str, Any]) -> Any:
    """Return `build_app(options)`: a builder of Ray Serve has one parameter."""
    return build_app(options)


def _from_text(value: str, option: Option) -> Any:
    """Return a value that `serve run` got as text: what YAML reads in it, unless the option takes text."""
    kinds = get_args(option.type) or (option.type,)
    if str in kinds or get_origin(option.type) is Literal:
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ValueError(f"{option.name}={value!r} cannot be read: {error}") from error


def _is_path(value: str) -> bool:
    return "\n" not in value and len(value) < 4096 and Path(value).exists()
