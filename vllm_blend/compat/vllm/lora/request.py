"""`vllm.lora.request`."""

from vllm_blend.unsupported import unsupported_class

LoRARequest = unsupported_class("LoRARequest", "merge the LoRA adapter into the weights and load the merged model")

__all__ = ["LoRARequest"]
