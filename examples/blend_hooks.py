"""Blend by hand, through the hooks of CacheBlend's vLLM fork: collect the KV of each passage, join it, blend.

    python examples/blend_hooks.py

Everything happens on the decoder stack: `cache_fuse_metadata` says what the next prompt does, `hack_kv` of a layer
holds what `collect` saved (K before RoPE, V), and `old_kvs` holds what `check` blends. Pieces stay token ids
throughout: text that is decoded and encoded again may change its length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from vllm_blend import LLM, RequestOutput, SamplingParams, TokensPrompt
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample

ROOT = Path(__file__).resolve().parents[1]


def first_token_ms(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_time is not None and metrics.first_scheduled_time is not None
    return 1000 * (metrics.first_token_time - metrics.first_scheduled_time)


def main() -> None:
    llm = LLM(str(ROOT / "inputs/demo-model"))
    decoder: Any = llm.llm_engine.model_executor.driver_worker.model_runner.model.model
    metadata = decoder.cache_fuse_metadata
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])

    sample = normalize_sample(load_dataset(ROOT / "inputs/musique_s.json")[0])
    prompt = build_qa_prompt(sample, "musique")
    prefix = list(tokenizer.encode(prompt["prefix"]))  # with the BOS token
    passages = [list(tokenizer.encode(str(chunk), add_special_tokens=False)) for chunk in prompt["chunks"]]
    question = list(tokenizer.encode(prompt["suffix"], add_special_tokens=False))

    # 1. Collect: every passage after the prefix, as if it were the only one. The prefix itself comes with the first.
    metadata["collect"] = True
    collected: list[list[list[torch.Tensor]]] = []
    for index, passage in enumerate(passages):
        llm.generate({"prompt_token_ids": prefix + passage}, SamplingParams(max_tokens=1), use_tqdm=False)
        start = 0 if index == 0 else len(prefix)
        collected.append([[kv[start:].clone() for kv in layer.self_attn.hack_kv] for layer in decoder.layers])
    metadata["collect"] = False

    # 2. Put the pieces together, layer by layer. The question has no rows: it is always computed.
    decoder.old_kvs = [
        [torch.cat(pieces) for pieces in zip(*layer, strict=True)] for layer in zip(*collected, strict=True)
    ]

    # 3. Blend: `check` holds for the next prompt only, so it is set again for each. old_kvs can be used again.
    whole: TokensPrompt = {"prompt_token_ids": prefix + [token for passage in passages for token in passage] + question}
    rules = [("none", 0.0), ("value_deviation", 0.16), ("question_attention", 0.16), ("value_deviation", 1.0)]
    for selector, ratio in rules:
        metadata.update(check=True, selector=selector, recomp_ratio=ratio, suffix_len=len(question))
        [output] = llm.generate(whole, params, use_tqdm=False)
        recomputed = len(metadata["imp_indices"]) - len(question)  # the question's positions come last
        print(
            f"{selector:18s} {ratio:4.2f}: {recomputed} of {metadata['org_seq_len'] - len(question)} "
            f"tokens recomputed, first token after {first_token_ms(output):.0f} ms:{output.outputs[0].text}"
        )
    [output] = llm.generate(whole, params, use_tqdm=False)
    print(f"full prefill: first token after {first_token_ms(output):.0f} ms:{output.outputs[0].text}")
    print(f"{sample.question} {sample.answers[0]}")


if __name__ == "__main__":
    main()
