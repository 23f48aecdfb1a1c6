"""The chunk store of an engine, and the controller over it, as its configuration asks for them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from vllm_blend.blend.controller import LoadingController
from vllm_blend.config import BlendConfig, EngineConfig
from vllm_blend.core.step import ScheduledRequest, SchedulerOutput
from vllm_blend.engine.composer import ChunkComposer
from vllm_blend.engine.metrics import EngineMetrics, Gauge
from vllm_blend.kv_store.disk import DiskChunkStore
from vllm_blend.kv_store.keys import ModelFingerprint
from vllm_blend.kv_store.options import ChunkStoreConfig
from vllm_blend.kv_store.pinned_memory import make_chunk_store
from vllm_blend.kv_store.remote import RemoteChunkStore
from vllm_blend.kv_store.signing import ChunkSigner
from vllm_blend.kv_store.store_config import DiskStoreConfig, RemoteStoreConfig
from vllm_blend.kv_store.tiered import MAX_WRITE_BYTES, Tier, TieredChunkStore
from vllm_blend.kv_store.tiers import DISK, MEMORY, REMOTE, ChunkLoad
from vllm_blend.worker.runner_output import RunnerOutput
from vllm_blend.worker.worker import Worker

PROBE_BYTES = 64 << 20  # copied once, to find out how fast the link to a GPU is


def make_controller(config: BlendConfig, worker: Worker) -> LoadingController | None:
    """Return the controller that `blend_controller` asks for. It knows from the start how fast the link to a GPU is."""
    if not config.controller:
        return None
    controller = LoadingController(worker.shape.bytes_per_token)
    if config.resolve_chunk_device(worker.device) != worker.device:
        controller.loaded(ChunkLoad(MEMORY, PROBE_BYTES, 1), _link_seconds(worker.device))
    return controller


def make_store(
    config: EngineConfig, model: ModelFingerprint, worker: Worker, controller: LoadingController | None
) -> TieredChunkStore:
    """Return a store in memory, over the tiers that the configuration names, if any. Raises ValueError naming the
    setting and the fix."""
    memory = make_chunk_store(
        int(config.blend.chunk_cache_gib * 2**30),
        config.blend.resolve_chunk_device(worker.device),
        worker.device,
        worker.model_runner.block_pass.placement.in_flight,
    )
    max_write_bytes = min(MAX_WRITE_BYTES, memory.budget_bytes // 4)
    below, signer = [], _signer(config.chunk_store)
    if config.chunk_store.path is not None:
        below.append(_disk(config.chunk_store, Path(config.chunk_store.path), model, max_write_bytes, signer))
    if config.chunk_store.url is not None:
        below.append(_server(config.chunk_store, config.chunk_store.url, model, max_write_bytes, signer))
    return TieredChunkStore(memory, below, controller)


def store_gauges(composer: ChunkComposer, worker: Worker) -> list[Gauge]:
    """Return metrics of the chunk store and its tiers, and of the controller."""
    store, controller = composer.store, composer.planner.controller
    values: list[tuple[str, float]] = [
        ("chunk_cache_chunks", len(store)),
        ("chunk_cache_bytes", store.num_bytes),
        ("chunks_encoded", composer.num_encoded),
    ]
    values += [(f"chunk_store_{name}", value) for name, value in store.gauges()]
    values += [(f"tenant_chunk_bytes_{tier}_{owner}", value) for tier, owner, value in store.held() if owner]
    values.append((f"chunk_store_{MEMORY}_load_seconds", worker.model_runner.block_pass.placement.seconds))
    if composer.loader is not None:
        values += [("chunk_loads_waiting", len(composer.loader)), ("chunk_loads_late", composer.loader.num_late)]
        values += [("prompts_started_early", composer.num_early), ("prompts_started_again", composer.num_lost)]
    if controller is not None:
        values += controller.gauges()
    return [Gauge(f"vllm_blend:{name}", value) for name, value in values]


def observe_step(
    metrics: EngineMetrics,
    controller: LoadingController | None,
    scheduled: SchedulerOutput,
    result: RunnerOutput,
    device: torch.device,
    start: float,
) -> None:
    """Note how long a step took that began at `start` (time.perf_counter) and has just been read, if it says something
    about prefill. The controller is told, too."""
    num_tokens = _prefilled(scheduled.scheduled)
    if num_tokens is None:
        return
    if device.type == "cuda" and result.tokens is None:  # nothing was read, so it may still run
        if controller is None or controller.knows_prefill:
            return
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - start
    metrics.count_prefill(num_tokens, seconds)
    if controller is not None:
        controller.prefilled(num_tokens, seconds)


def _prefilled(items: Iterable[ScheduledRequest]) -> int | None:
    """Return how many tokens a step prefills; None if it does something else, as blends do that choose tokens."""
    total = 0
    for item in items:
        if item.is_decode or (item.is_blend and item.request.params is not None):
            return None
        total += item.num_tokens if item.request.blend is None else item.request.blend.num_scheduled_tokens
    return total


def _signer(config: ChunkStoreConfig) -> ChunkSigner | None:
    if config.key_file is None:
        return None
    try:
        return ChunkSigner.from_file(config.key_file)
    except (OSError, ValueError) as error:
        raise ValueError(f"chunk_store_key_file={config.key_file!r} cannot be used: {error}") from error


def _disk(
    config: ChunkStoreConfig, path: Path, model: ModelFingerprint, max_write_bytes: int, signer: ChunkSigner | None
) -> Tier:
    settings = DiskStoreConfig(
        path,
        max(1, int(config.gib * 2**30)),
        model.digest,
        config.format,
        config.admit_on_second_use,
        exact=config.format == "auto",
        fingerprint=model,
        signer=signer,
    )
    try:
        store = DiskChunkStore(settings)
    except (OSError, sqlite3.Error) as error:
        raise ValueError(
            f"chunk_store_path={str(path)!r} cannot be used ({type(error).__name__}: {error}): name a folder of a "
            "local disk that this process may write to"
        ) from error
    return Tier(DISK, store, max_write_bytes, store.read_many)


def _server(
    config: ChunkStoreConfig, url: str, model: ModelFingerprint, max_write_bytes: int, signer: ChunkSigner | None
) -> Tier:
    exact = config.format == "auto"
    try:
        store = RemoteChunkStore(RemoteStoreConfig(url, model.digest, config.format, exact=exact, signer=signer))
    except ValueError as error:
        raise ValueError(
            f"chunk_store_url: {error}: give a URL such as redis://host:6379/0, s3://bucket/folder or file:///folder"
        ) from error
    return Tier(REMOTE, store, max_write_bytes)


def _link_seconds(device: torch.device) -> float:
    """Return the seconds that `PROBE_BYTES` take from pinned memory to a GPU while nothing else runs."""
    source = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(PROBE_BYTES, dtype=torch.uint8, device=device)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source, non_blocking=True)  # the first copy also sets things up
    start.record()
    target.copy_(source, non_blocking=True)
    stop.record()
    stop.synchronize()
    milliseconds: float = start.elapsed_time(stop)
    return milliseconds / 1e3
