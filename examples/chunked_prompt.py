"""Reuse the KV cache of passages wherever they stand in a prompt.

    python examples/chunked_prompt.py

A question over passages, then over some of them in another order. The first prompt computes and stores the passages'
KV; the second one reuses all of it and computes only what its question pays attention to, so it answers earlier. (Had
another passage come first, that one would be computed once more: what stands first is stored as such, and is exact.)
"""

from __future__ import annotations

from pathlib import Path

from vllm_blend import LLM, ChunkedPrompt, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    llm = LLM(str(ROOT / "inputs/demo-model"), enable_blending=True, blend_recompute_ratio=0.15)
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])
    sample = normalize_sample(load_dataset(ROOT / "inputs/musique_s.json")[0])
    first = build_qa_prompt(sample, "musique")
    reordered = build_qa_prompt(sample, "musique", passages=[0, 1, 4, 5, 6, 2, 3])
    whole: ChunkedPrompt = {**reordered, "blend_selector": "full"}  # recompute everything: the exact answer
    for name, prompt in (("first sight", first), ("in another order", reordered), ("in full", whole)):
        [output] = llm.generate(prompt, params, use_tqdm=False)
        metrics, blend = output.metrics, output.blend
        assert metrics is not None and blend is not None
        assert metrics.first_token_time is not None and metrics.first_scheduled_time is not None
        ttft = 1000 * (metrics.first_token_time - metrics.first_scheduled_time)
        computed = blend.num_encoded_tokens + blend.num_recomputed_tokens
        print(
            f"{name:17s} {len(output.prompt_token_ids)} prompt tokens, {computed} of them computed "
            f"({blend.selector}), first token after {ttft:.0f} ms:{output.outputs[0].text}"
        )
    print(f"{sample.question} {sample.answers[0]}")


if __name__ == "__main__":
    main()
