"""The placement group in which an engine's ranks run on a Ray cluster: its actor's own, or one made for them."""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from vllm_blend.checks import require
from vllm_blend.executor.ray_cluster import Place, connection_id, is_connected

logger = logging.getLogger(__name__)

NODE_LABEL = "ray.io/node-id"
LOG_SECONDS = 10.0  # between two lines about resources that are waited for
ANSWER_SECONDS = 60.0  # in which a bundle says which GPU it has
ANY_BUNDLE = -1

Resource = Literal["CPU", "GPU"]


@dataclass(frozen=True)
class Placement:
    """Where the ranks 1, 2, ... go: a CPU or a GPU each, in these bundles of a group."""

    group: PlacementGroup
    bundles: list[int]
    resource: Resource

    def options(self, rank: int) -> dict[str, Any]:
        """Return the options of a rank's actor."""
        return _options(self.group, self.bundles[rank - 1], self.resource)


def reserve(size: int, device: torch.device, timeout: float, undo: ExitStack) -> Placement:
    """Return the place of `size` ranks, of which rank 0 is this process, on `device`. What is made for them is removed
    by `undo`.

    Raises ValueError that says what was asked for and what there is, after `timeout` seconds if it could still come.
    """
    place = Place.current()
    resource: Resource = "GPU" if device.type == "cuda" else "CPU"
    require(
        resource == "CPU" or place.has("GPU") or not place.is_actor,
        f"tensor_parallel_size={size} with distributed_executor_backend='ray': the actor that has the engine runs rank "
        "0, but Ray has reserved no GPU for it: give it num_gpus=1",
    )
    if place.group is not None:
        return _in_group_of_actor(size, place, resource)
    num_bundles = size - place.has(resource)
    here = [{NODE_LABEL: ray.get_runtime_context().get_node_id()}] if num_bundles == size else []
    group = placement_group(
        [{resource: 1.0}] * num_bundles, strategy="PACK", bundle_label_selector=[*here, *[{}] * (size - 1)]
    )
    undo.callback(_remove, group, connection_id())
    _wait(group, size, num_bundles, resource, timeout)
    of_rank_0 = [_bundle_of(device, group)] if here and resource == "GPU" else [0] if here else []
    return Placement(group, [index for index in range(num_bundles) if index not in of_rank_0], resource)


def _in_group_of_actor(size: int, place: Place, resource: Resource) -> Placement:
    assert place.group is not None
    group = PlacementGroup(ray.PlacementGroupID(bytes.fromhex(place.group)))
    bundles = group.bundle_specs
    total = sum(int(bundle.get(resource, 0.0)) for bundle in bundles)
    own = int(place.resources.get(resource, 0.0))
    require(
        total - own >= size - 1,
        f"tensor_parallel_size={size} with distributed_executor_backend='ray' needs {size - 1} bundles with a whole "
        f"{resource} for the other ranks in the placement group that this actor runs in, beside the {own} of the "
        f"actor, but the group is {bundles}: add them, or run the actor outside of a group",
    )
    return Placement(group, [ANY_BUNDLE] * (size - 1), resource)


def _wait(group: PlacementGroup, size: int, num_bundles: int, resource: Resource, timeout: float) -> None:
    """Wait until the group's resources are reserved. Raises ValueError if they are not in time."""
    asked = f"{num_bundles} {resource}s, of which one on this node" if num_bundles == size else f"{num_bundles} more"
    ready, deadline = group.ready(), time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        if ray.wait([ready], timeout=max(0.0, min(LOG_SECONDS, left)))[0]:
            return
        there = (
            f"{ray.cluster_resources().get(resource, 0.0):g} {resource}s in {_num_nodes()} nodes, of which "
            f"{ray.available_resources().get(resource, 0.0):g} are free"
        )
        require(
            left > LOG_SECONDS,
            f"tensor_parallel_size={size} with distributed_executor_backend='ray' needs {asked}, but after {timeout:g} "
            f"seconds the Ray cluster has {there}: lower it, add nodes, end what uses them, or raise "
            "ray_placement_timeout",
        )
        logger.warning("%d ranks wait for %s: the Ray cluster has %s", size, asked, there)


def _num_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def _bundle_of(device: torch.device, group: PlacementGroup) -> int:
    """Return the bundle with this process's GPU, for which no other rank may be started. Raises ValueError if Ray has
    reserved others: a program that is no actor is not told which to use."""
    ask = ray.remote(_where)
    asked = [ask.options(**_options(group, index, "GPU")).remote() for index in range(group.bundle_count)]
    answers: list[tuple[str, str]] = ray.get(asked, timeout=ANSWER_SECONDS)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    node = ray.get_runtime_context().get_node_id()
    here = [name for of_node, name in answers if of_node == node]
    own = (node, names[device.index or 0])
    usable = [f"device='cuda:{names.index(name)}'" for name in here if name in names]
    require(
        own in answers,
        f"device={str(device)!r} is GPU {own[1]} of this node, but Ray has reserved {', '.join(here)} for the ranks "
        f"here: give {' or '.join(usable) or 'a device among them by CUDA_VISIBLE_DEVICES'}",
    )
    return answers.index(own)


def _where() -> tuple[str, str]:
    """Return the node and the GPU of a bundle, in which this runs."""
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"][0]


def _options(group: PlacementGroup, bundle: int, resource: Resource) -> dict[str, Any]:
    return {
        "num_cpus": int(resource == "CPU"),
        "num_gpus": int(resource == "GPU"),
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
    }


def _remove(group: PlacementGroup, connection: str) -> None:
    if is_connected(connection):
        remove_placement_group(group)
