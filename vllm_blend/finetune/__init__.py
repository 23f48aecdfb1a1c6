"""Continued training that makes a model answer as well from reused chunk KV as from full prefill.

`rows` are training prompts as arrays, made from the project's synthetic worlds (`worlds`) or from data sets
(`samples`); `masks` draws what of a prompt is reused; `attention` computes exactly what reuse computes, inside any
Llama or Qwen of transformers; `loop` trains; `saving` writes a model directory; `command` is `vllm-blend finetune`.
"""
