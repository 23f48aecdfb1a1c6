"""The deployments of an application on Ray Serve, and their settings."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from vllm_blend.engine_args import EngineArgs
from vllm_blend.entrypoints.openai.options import ServerOptions
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
    actor: dict[str, Any] = {"num_cpus": ray_options.num_cpus, "num_gpus": ray_options.num_gpus}
    if ray_options.resources:
        actor["resources"] = ray_options.resources
    settings: dict[str, Any] = {
        "ray_actor_options": actor,
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


def _ingress_builder(options: ServerOptions, ray_options: RayOptions) -> Any:
    """Return a function that makes the ingress's application in its process. Ray Serve wants a plain function."""
    size, retries, is_only = options.max_body_size, ray_options.retries, ray_options.most_replicas == 1

    def build() -> Any:
        def get_handle() -> Any:
            return serve.get_deployment_handle(ENGINE, app_name=serve.get_replica_context().app_name)

        return make_ingress_app(get_handle, size, retries, is_only)

    return build
