"""Flags of `vllm serve` that `vllm-blend serve` does not have: those that change no answer here cause a warning, and
the server starts without them; all others are refused, unless they have vLLM's default."""

from __future__ import annotations

import argparse
import logging
from typing import Any

import yaml

from vllm_blend.entrypoints.openai.options import ServerOptions
from vllm_blend.unsupported import Unsupported
from vllm_blend.unsupported.engine_args import UNSUPPORTED_ENGINE_ARGS
from vllm_blend.unsupported.server_flags import UNSUPPORTED_SERVER_FLAGS

logger = logging.getLogger(__name__)

# vLLM's short names.
SHORT_NAMES: dict[str, str] = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
    "optimization_level": "-O",
    "compilation_config": "-cc",
    "api_server_count": "-asc",
}
# Arguments of the engine that say how fast it works, how it loads, or what it shows of itself.
_OF_ENGINE = (
    *("swap_space", "enable_chunked_prefill", "max_num_partial_prefills", "max_long_partial_prefills"),
    *("long_prefill_token_threshold", "scheduler_reserve_full_isl", "num_scheduler_steps", "stream_interval"),
    *("disable_async_output_proc", "use_v2_block_manager", "prefix_caching_hash_algo", "renderer_num_workers"),
    *("disable_hybrid_kv_cache_manager", "model_loader_extra_config", "safetensors_load_strategy"),
    *("safetensors_prefetch_num_threads", "safetensors_prefetch_block_size", "pt_load_map_location"),
    *("max_parallel_loading_workers", "use_tqdm_on_load", "guided_decoding_disable_fallback", "compilation_config"),
    *("optimization_level", "performance_mode", "cudagraph_capture_sizes", "cuda_graph_sizes"),
    *("max_seq_len_to_capture", "kernel_config", "ir_op_priority", "linear_backend", "gdn_prefill_backend"),
    *("enable_flashinfer_autotune", "disable_cascade_attn", "enable_cumem_allocator", "kv_sharing_fast_prefill"),
    *("aggregate_engine_logging", "show_hidden_metrics_for_version", "kv_cache_metrics", "kv_cache_metrics_sample"),
    *("cudagraph_metrics", "enable_mfu_metrics", "enable_logging_iteration_details", "collect_detailed_traces"),
    *("enable_layerwise_nvtx_tracing", "ray_workers_use_nsight", "numa_bind", "numa_bind_nodes", "numa_bind_cpus"),
    *("enable_expert_parallel", "all2all_backend", "moe_backend", "limit_mm_per_prompt", "mm_processor_cache_gb"),
    *("mm_processor_cache_type", "fail_on_environ_validation"),
)
# Those of the server that say what is logged, or ask for what there is anyway.
_OF_SERVER = (
    *("enable_log_requests", "disable_log_requests", "enable_log_outputs", "enable_log_deltas", "max_log_len"),
    *("disable_uvicorn_access_log", "disable_access_log_for_endpoints", "disable_frontend_multiprocessing"),
    *("api_server_count", "enable_ssl_refresh", "enable_prompt_tokens_details", "enable_request_id_headers"),
    *("enable_server_load_tracking", "enable_offline_docs", "h11_max_incomplete_event_size"),
    *("exclude_tools_when_tool_choice_none", "log_error_stack"),
)
CHANGE_NOTHING = frozenset(_OF_ENGINE + _OF_SERVER)
_OWN = {option.name for option in ServerOptions.options()}  # which are no arguments of the engine
UNSUPPORTED: dict[str, Unsupported] = {
    **{name: Unsupported(None, reason) for name, reason in UNSUPPORTED_SERVER_FLAGS.items()},
    **{name: argument for name, argument in UNSUPPORTED_ENGINE_ARGS.items() if name not in _OWN},
}
_WITH_VALUE = ("max_log_len", "disable_access_log_for_endpoints", "api_server_count", "h11_max_incomplete_event_size")
_IS_SWITCH = ("enable_", "disable_", "use_", "exclude_", "log_error", "headless", "allow_credentials")
_DEST = "unsupported "


def add_unsupported_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags, which the help does not show. `check_unsupported_flags` says what is to be said of them."""
    for name, argument in UNSUPPORTED.items():
        flags = [SHORT_NAMES[name]] if name in SHORT_NAMES else []
        kind: dict[str, Any] = {"nargs": 1 if name in CHANGE_NOTHING else "*"}
        if _is_switch(name, argument):
            kind = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(
            *flags,
            "--" + name.strip("_").replace("_", "-"),
            dest=_DEST + name,
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
            **kind,
        )


def check_unsupported_flags(namespace: argparse.Namespace) -> None:
    """Log a warning for flags that change nothing here. Raises ValueError for one that would change answers."""
    for name, argument in UNSUPPORTED.items():
        if not hasattr(namespace, _DEST + name):
            continue
        given = getattr(namespace, _DEST + name)
        flag = "--" + name.replace("_", "-")
        if isinstance(given, bool):
            value: Any = given
            flag = flag if given else f"--no-{flag[2:]}"
        else:
            value = _read(given)
        if name in UNSUPPORTED_ENGINE_ARGS and (value == argument.default or value in argument.also):
            continue
        if name not in CHANGE_NOTHING:
            raise ValueError(f"{flag} is not supported: {argument.reason}")
        logger.warning("%s is ignored: %s", flag, argument.reason)


def _is_switch(name: str, argument: Unsupported) -> bool:
    if name in _WITH_VALUE:
        return False
    values = (argument.default, *argument.also)
    return any(isinstance(value, bool) for value in values) or name.startswith(_IS_SWITCH)


def _read(given: list[str]) -> Any:
    """Return the value of a flag: a number, an object or text, or a list if there are several."""
    values = []
    for text in given:
        try:
            values.append(yaml.safe_load(text))
        except yaml.YAMLError:
            values.append(text)
    return values[0] if len(values) == 1 else values
