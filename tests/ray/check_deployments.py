"""The settings that Ray Serve gets from the options."""

from __future__ import annotations

import pytest
from ray.serve.config import AutoscalingConfig

from tests.checkout import ROOT
from vllm_blend.ray import build_app
from vllm_blend.ray.app import read_options
from vllm_blend.ray.deployments import engine_settings
from vllm_blend.ray.router import PassageRouter

MODEL = str(ROOT / "inputs" / "demo-model-reuse")


def test_a_fixed_number_of_replicas() -> None:
    config = read_options({"model": MODEL, "replicas": 3, "num_gpus": 2.0, "max_num_seqs": 8, "resources": {"rack": 1}})
    settings = engine_settings(config.engine, config.server, config.ray)
    assert settings["num_replicas"] == 3 and "autoscaling_config" not in settings
    assert settings["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 2.0, "resources": {"rack": 1}}
    # The engine refuses what is too much with 429, so Ray Serve must not hold it back.
    assert settings["max_ongoing_requests"] > 8 + config.server.max_queued_requests
    router = settings["request_router_config"]
    assert router.get_request_router_class() is PassageRouter
    assert router.request_router_kwargs == {"policy": "affinity", "epsilon": 0.25}


def test_replicas_by_the_length_of_queues() -> None:
    config = read_options({"model": MODEL, "replicas": 2, "max_replicas": 9, "max_num_seqs": 8, "upscale_delay": 5.0})
    settings = engine_settings(config.engine, config.server, config.ray)
    scaling = settings["autoscaling_config"]
    assert isinstance(scaling, AutoscalingConfig) and "num_replicas" not in settings
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 9, 4.0)
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (5.0, 600.0)


def test_ranks_that_ray_places_have_a_group() -> None:
    ranks = {"model": MODEL, "tensor_parallel_size": 3, "distributed_executor_backend": "ray"}
    config = read_options(ranks | {"num_gpus": 3.0, "num_cpus": 2.0, "resources": {"rack": 1}})
    settings = engine_settings(config.engine, config.server, config.ray)
    assert settings["ray_actor_options"] == {"num_cpus": 2.0, "num_gpus": 1.0, "resources": {"rack": 1}}
    first, *others = settings["placement_group_bundles"]
    assert first == {"CPU": 2.0, "GPU": 1.0, "rack": 1} and others == [{"GPU": 1.0}] * 2
    config = read_options(ranks | {"num_gpus": 0.0, "num_cpus": 0.5})
    settings = engine_settings(config.engine, config.server, config.ray)
    assert settings["ray_actor_options"] == {"num_cpus": 0.5, "num_gpus": 0.0}
    assert settings["placement_group_bundles"] == [{"CPU": 0.5}, {"CPU": 1.0}, {"CPU": 1.0}]


def test_ranks_of_one_machine_are_reserved_for_the_replica() -> None:
    config = read_options({"model": MODEL, "tensor_parallel_size": 2, "num_gpus": 2.0})
    settings = engine_settings(config.engine, config.server, config.ray)
    assert settings["ray_actor_options"]["num_gpus"] == 2.0 and "placement_group_bundles" not in settings


def test_what_is_wrong_is_said_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="max_model_len=4096 is above the 1024 positions"):
        build_app({"model": MODEL, "max_model_len": 4096, "replicas": 2})
    with pytest.raises(ValueError, match="replicas is given twice"):
        build_app({"model": MODEL, "replicas": 2}, replicas=3)
    ranks = {"model": MODEL, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    with pytest.raises(ValueError, match=r"num_gpus=1 with .* each of the 2 ranks has a GPU, or none has: give 2 or 0"):
        build_app(ranks | {"num_gpus": 1.0})
    with pytest.raises(ValueError, match="num_cpus=0 with distributed_executor_backend='ray'"):
        build_app(ranks | {"num_cpus": 0.0, "num_gpus": 0.0})
    with pytest.raises(ValueError, match="api_keys: /no/such/file cannot be read"):
        build_app({"model": MODEL, "api_keys": "/no/such/file"})
