"""What each metric of an engine means, under the name that Prometheus sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineMetric:
    """A metric. A total only grows, and Prometheus's text has `_total` behind its name; `labels` are those besides
    `model_name`."""

    help: str
    is_total: bool = False
    labels: tuple[str, ...] = ()


def _total(help: str, *labels: str) -> EngineMetric:
    return EngineMetric(help, True, labels)


def _now(help: str, *labels: str) -> EngineMetric:
    return EngineMetric(help, False, labels)


ENGINE_METRICS = {
    "vllm:num_requests_running": _now("Requests in the batch."),
    "vllm:num_requests_waiting": _now("Requests that wait for the batch."),
    "vllm:kv_cache_usage_perc": _now("Share of the KV cache that is used; 1 is all of it."),
    "vllm:num_preemptions": _total("Number of times that a request had to give its pages back."),
    "vllm:prompt_tokens": _total("Prompt tokens of requests that began to run."),
    "vllm:generation_tokens": _total("Tokens that were generated."),
    "vllm:prefix_cache_queries": _total("Prompt tokens that were looked up in the prefix cache."),
    "vllm:prefix_cache_hits": _total("Prompt tokens that were found in the prefix cache."),
    "vllm:spec_decode_num_drafts": _total("Number of times that tokens were drafted for a request."),
    "vllm:spec_decode_num_draft_tokens": _total("Tokens that were drafted."),
    "vllm:spec_decode_num_accepted_tokens": _total(
        "Drafted tokens that were accepted, as the model would have chosen them too."
    ),
    "vllm_blend:num_steps": _total("Steps of the engine."),
    "vllm_blend:prefill_peak_tokens_per_second": _now(
        "Speed of the fastest step that only prefilled; 0 before the first one."
    ),
    "vllm_blend:kv_cache_blocks": _now("Blocks of the KV cache, as measured when the engine started."),
    "vllm_blend:compositions_retained": _now("Blended contexts whose pages are kept for further questions over them."),
    # passages
    "vllm_blend:found_tokens": _total("Prompt tokens whose KV was found, by the place where it was.", "source"),
    "vllm_blend:blended_prompts": _total("Prompts that were blended from chunks."),
    "vllm_blend:blend_reused_tokens": _total("Tokens of blended prompts whose stored KV was used and not recomputed."),
    "vllm_blend:blend_encoded_tokens": _total(
        "Tokens of chunks that were not stored and were encoded for their prompt."
    ),
    "vllm_blend:blend_recomputed_tokens": _total("Tokens of blended prompts that were computed in the blend."),
    "vllm_blend:chat_parts_merged": _total("Text parts of chats that share a token with the text beside them."),
    "vllm_blend:chat_parts_unfound": _total("Text parts of chats whose text the template changed."),
    "vllm_blend:prompts_started_early": _total("Prompts that began while their chunks were being loaded."),
    "vllm_blend:prompts_started_again": _total(
        "Prompts that began again because a chunk turned out to be damaged or late."
    ),
    # the chunk store
    "vllm_blend:chunk_store_hits": _total("Chunks that a tier was asked for and had.", "tier"),
    "vllm_blend:chunk_store_misses": _total(
        "Chunks that a tier was asked for and did not have, or could not give.", "tier"
    ),
    "vllm_blend:chunk_store_errors": _total("Chunks that a tier failed to read or to write.", "tier", "operation"),
    "vllm_blend:chunk_store_refused": _total(
        "Chunks that a tier does not take: too large for it, or with values that its format cannot hold.", "tier"
    ),
    "vllm_blend:chunk_store_read_bytes": _total("Bytes that were read from a tier.", "tier"),
    "vllm_blend:chunk_store_written_bytes": _total("Bytes that were written to a tier.", "tier"),
    "vllm_blend:chunk_store_load_seconds": _total(
        "Time in which a tier was read from. For the memory it is the time to put chunks into the KV cache; where that "
        "is on a GPU and the chunks are not, the copies run beside the model, and only the time to begin them counts.",
        "tier",
    ),
    "vllm_blend:chunk_store_bytes": _now("Bytes that a tier keeps.", "tier"),
    "vllm_blend:chunk_store_chunks": _now("Chunks that a tier keeps.", "tier"),
    "vllm_blend:tenant_chunk_bytes": _now("Bytes that a tier keeps of a tenant (--tenant-metrics).", "tenant", "tier"),
    "vllm_blend:chunk_cache_bytes": _now("Bytes that the memory tier keeps."),
    "vllm_blend:chunk_cache_chunks": _now("Chunks that the memory tier keeps."),
    "vllm_blend:chunks_encoded": _total("Chunks whose KV was computed for the store."),
    "vllm_blend:chunks_registered": _now("Chunks that are registered by name."),
    "vllm_blend:chunk_loads_waiting": _now("Chunks that are being loaded or wait to be loaded."),
    "vllm_blend:chunk_loads_late": _total("Chunks that took too long to load and were computed instead."),
    # blend_controller
    "vllm_blend:controller_prompts_raised": _total(
        "Prompts for which more was recomputed because their chunks took time to load."
    ),
    "vllm_blend:controller_chunks_recomputed": _total(
        "Chunks that were computed because loading them would take longer."
    ),
    "vllm_blend:controller_ratio": _now("Share of tokens that the controller chose to recompute for the last prompt."),
    "vllm_blend:controller_prefill_tokens_per_second": _now("Speed of prefill, as measured."),
    "vllm_blend:controller_load_bytes_per_second": _now("Speed of loading from a tier, as measured.", "tier"),
    # features
    "vllm_blend:structured_requests": _total("Completions that were held to a schema, a grammar or the like."),
    "vllm_blend:grammars_compiled": _total("Schemas, grammars and the like that were compiled."),
    "vllm_blend:grammars_found": _total(
        "Schemas, grammars and the like that had already been compiled when they were needed."
    ),
    "vllm_blend:kv_event_batches": _total("Batches of events about the prefix cache (kv_events_config)."),
    "vllm_blend:kv_event_batches_dropped": _total(
        "Batches of events that were dropped unsent because the queue was full."
    ),
    "vllm_blend:kv_compressions": _total("Number of times that a request's KV was compressed (enable_kvc)."),
    "vllm_blend:kvs_evicted": _total("KVs of single heads that were evicted (enable_kvc)."),
    "vllm_blend:head_pages_freed": _total("Head pages that evictions have freed (enable_kvc)."),
    "vllm_blend:head_pages_used": _now("Head pages that are in use (enable_kvc)."),
    "vllm_blend:chunk_promotions": _total("Chunks that were moved to the GPU while decoding (offload)."),
    "vllm_blend:chunk_evictions": _total("Chunks that were moved off the GPU while decoding (offload)."),
    "vllm_blend:offload_moved_bytes": _total("Bytes that were moved while decoding (offload)."),
    "vllm_blend:offload_moves_dropped": _total("Moves that were no longer needed when they ended (offload)."),
    "vllm_blend:offload_plans_dropped": _total(
        "Plans of moves that were dropped because they no longer fitted the request (offload)."
    ),
    "vllm_blend:offload_host_blocks_free": _now("Blocks of host memory that are free (offload)."),
}
