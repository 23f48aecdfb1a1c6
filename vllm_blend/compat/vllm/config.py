"""`vllm.config`: `ModelConfig` is what `llm_engine.model_config` is, and `KVEventsConfig` an argument of `LLM`; other
settings are arguments of `LLM`, not objects."""

from vllm_blend.engine.setup import LoadedModelConfig as ModelConfig
from vllm_blend.features.kv_events.config import KVEventsConfig
from vllm_blend.unsupported import unsupported_class

_FLAT = "give its settings to LLM or EngineArgs by name"

CacheConfig = unsupported_class("CacheConfig", _FLAT)
CompilationConfig = unsupported_class("CompilationConfig", "models are not compiled; give enforce_eager to LLM")
KVTransferConfig = unsupported_class("KVTransferConfig", "engines share KV by chunk_store_url or chunk_store_path")
LoadConfig = unsupported_class("LoadConfig", _FLAT)
LoRAConfig = unsupported_class("LoRAConfig", "merge the LoRA adapter into the weights and load the merged model")
ParallelConfig = unsupported_class("ParallelConfig", "give tensor_parallel_size to LLM")
PoolerConfig = unsupported_class("PoolerConfig", "only text generation is supported")
SchedulerConfig = unsupported_class("SchedulerConfig", _FLAT)
SpeculativeConfig = unsupported_class("SpeculativeConfig", "give speculative_config to LLM as a dict")
StructuredOutputsConfig = unsupported_class(
    "StructuredOutputsConfig", "give structured_outputs_config to LLM as a dict"
)
VllmConfig = unsupported_class("VllmConfig", _FLAT)

__all__ = [
    "CacheConfig",
    "CompilationConfig",
    "KVEventsConfig",
    "KVTransferConfig",
    "LoRAConfig",
    "LoadConfig",
    "ModelConfig",
    "ParallelConfig",
    "PoolerConfig",
    "SchedulerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "VllmConfig",
]
