"""Use LMCache's blending API: compute the KV of two texts, then ask about both, in either order.

    LMCACHE_CONFIG_FILE=examples/kv_blend.yaml python examples/kv_blend.py

A script for LMCache runs unchanged. `python -m lmcache_vllm --help` does the same from the command line.
"""

from __future__ import annotations

from pathlib import Path

import lmcache_vllm
from lmcache_vllm.blend_adapter import OfflineKVPreCompute, combine_input_prompt_chunks
from lmcache_vllm.vllm import LLM, RequestOutput, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
INSTRUCTION = "You will be asked a question after reading several passages. Answer within five words.\nPassages:\n"
QUESTION = "Question: {}\nAnswer:"


def show(name: str, output: RequestOutput) -> None:
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_time is not None and metrics.first_scheduled_time is not None
    ttft = metrics.first_token_time - metrics.first_scheduled_time
    reused = output.num_cached_tokens or 0
    print(
        f"{name:15s} {reused} of {len(output.prompt_token_ids)} tokens reused, first token after {1000 * ttft:.0f} ms:"
        f"{output.outputs[0].text}"
    )


def main() -> None:
    texts = [(ROOT / "examples" / name).read_text(encoding="utf-8") for name in ("chunk1.txt", "chunk2.txt")]
    llm = LLM(model=str(ROOT / "inputs/demo-model"))
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])
    precompute = OfflineKVPreCompute(llm)
    for text in texts:
        precompute.precompute_kv(text)

    what, where = (QUESTION.format(q) for q in ("What does Tulmaris Works make?", "Where was Kestria Noulmand born?"))
    for name, pieces in (
        ("both texts", [INSTRUCTION, *texts, what]),
        ("other order", [INSTRUCTION, *reversed(texts), what]),
        ("other question", [INSTRUCTION, *texts, where]),
        ("one text", [INSTRUCTION, texts[1], what]),
    ):
        [output] = llm.generate(combine_input_prompt_chunks(pieces), params, use_tqdm=False)
        show(name, output)
    lmcache_vllm.close_lmcache_engine()


if __name__ == "__main__":
    main()
