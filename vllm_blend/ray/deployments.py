"""The deployments of an application on Ray Serve, and their settings."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from vllm_blend.engine_args import EngineArgs
from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.entrypoints.openai.tenancy import Tenants
from vllm_blend.ray.ingress import make_ingress_app
from vllm_blend.ray.options import RayOptions
from vllm_blend.ray.replica import Replica
from vllm_blend.ray.router import PassageRouter

ENGINE, INGRESS = "vllm-blend-engine", "vllm-blend-ingress"
INGRESS_REQUESTS = 10_000  # that one ingress forwards at a time: the engines' queues are the limit


def make_application(args: EngineArgs, options: ServerOptions, ray_options: RayOptions) -> Any:
    """Return the ingress, bound to the engines."""
    engines = serve.deployment(Replica, name=ENGINE, **engine_settings(args, options, ray_options))
    ingress = serve.deployment(
        serve.ingress(_ingress_builder(options, ray_options))(),
        name=INGRESS,
        num_replicas=ray_options.ingress_replicas,
        ray_actor_options={"num_cpus": ray_options.ingress_cpus},
        max_ongoing_requests=INGRESS_REQUESTS,
        graceful_shutdown_timeout_s=options.shutdown_timeout,
    )
    return ingress.bind(engines.bind(args, options))


def engine_settings(args: EngineArgs, options: ServerOptions, ray_options: RayOptions) -> dict[str, Any]:
    """Return the settings of the engines' deployment."""
    running = args.max_num_seqs
    settings: dict[str, Any] = {
        **_resources(args, ray_options),
        # More than the engine takes: it refuses the rest at once, with 429 and the seconds to wait.
        "max_ongoing_requests": running + options.max_queued_requests + running,
        "graceful_shutdown_timeout_s": options.shutdown_timeout,
        "request_router_config": RequestRouterConfig(
            request_router_class=PassageRouter,
            request_router_kwargs={"policy": ray_options.routing, "epsilon": ray_options.epsilon},
        ),
    }
    if ray_options.max_replicas is None:
        return settings | {"num_replicas": ray_options.replicas}
    scaling = AutoscalingConfig(
        min_replicas=ray_options.replicas,
        max_replicas=ray_options.max_replicas,
        target_ongoing_requests=ray_options.target_requests or max(1.0, running / 2),
        upscale_delay_s=ray_options.upscale_delay,
        downscale_delay_s=ray_options.downscale_delay,
    )
    return settings | {"autoscaling_config": scaling}


def _resources(args: EngineArgs, ray_options: RayOptions) -> dict[str, Any]:
    """Return what Ray Serve reserves for an engine: all of it for the replica; or, if Ray places the ranks, a group
    whose first bundle has the replica with rank 0 in it, and whose others have a rank each."""
    size = args.tensor_parallel_size
    is_placed = size > 1 and args.distributed_executor_backend == "ray"
    gpus = (ray_options.num_gpus or 0.0) / (size if is_placed else 1)
    actor: dict[str, Any] = {"num_cpus": ray_options.num_cpus, "num_gpus": gpus}
    if ray_options.resources:
        actor["resources"] = ray_options.resources
    if not is_placed:
        return {"ray_actor_options": actor}
    first = {"CPU": ray_options.num_cpus, "GPU": gpus, **(ray_options.resources or {})}
    others: list[dict[str, float]] = [{"GPU": 1.0} if gpus else {"CPU": 1.0}] * (size - 1)
    return {
        "ray_actor_options": actor,
        "placement_group_bundles": [{name: amount for name, amount in first.items() if amount}, *others],
        "placement_group_strategy": "PACK",
    }


def _ingress_builder(options: ServerOptions, ray_options: RayOptions) -> Any:
    """Return a function that makes the ingress's application in its process. Ray Serve wants a plain function. Raises
    ValueError for keys that cannot be read."""
    tenants = Tenants.from_options(options.api_key, options.api_keys)
    size, retries, is_only = options.max_body_size, ray_options.retries, ray_options.most_replicas == 1

    def build() -> Any:
        def get_handle() -> Any:
            return serve.get_deployment_handle(ENGINE, app_name=serve.get_replica_context().app_name)

        return make_ingress_app(get_handle, tenants, size, retries, is_only)

    return build
