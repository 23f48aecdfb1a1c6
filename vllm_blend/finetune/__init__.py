"""Continued training that makes a model answer as well from reused chunk KV as from full prefill.

`rows` are training prompts as arrays, made from synthetic worlds (`worlds`) or from data sets (`samples`), and
`sources` says which; `masks` draws what of a prompt is reused, and `attention` computes exactly what reuse computes,
inside a Llama, Mistral or Qwen of transformers. `loop` trains by a `plan`: `losses` has the next token and the
distribution of a `teacher`, `lora` an adapter, `evaluation` the development rows, `state` the checkpoints. `saving`
writes a model directory. `command` is `vllm-blend finetune`, and `measure` its --measure-only; `run` and `options` are
shared with `scripts/train/train.py`.
"""
