"""Make prompts of registered chunks: compute a passage once, ask about any of them in any order.

    python examples/chunk_api.py

Registering passages computes their KV; a composition names them by id. If everything has been computed exactly, a
second question over the same passages computes only itself. An answer becomes a chunk too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm_blend import ChunkedLLM, RequestOutput, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    llm = ChunkedLLM(str(ROOT / "inputs/demo-model"))
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])
    sample = normalize_sample(load_dataset(ROOT / "inputs/musique_s.json")[0])
    prompt: Any = build_qa_prompt(sample, "musique")
    system = llm.register_chunk(prompt["prefix"], "SYSTEM_PROMPT", name="instruction")
    passages = [llm.register_chunk(text, "CONTEXT", metadata={"passage": i}) for i, text in enumerate(prompt["chunks"])]
    ids = [chunk.id for chunk in passages]

    def ask(name: str, chunk_ids: list[str], question: str, **options: Any) -> None:
        output = llm.generate_from_chunks("instruction", chunk_ids, query=question, sampling_params=params, **options)
        print(f"{name:18s} {report(output)}")

    ask("first question", ids, prompt["suffix"])
    ask("in another order", ids[::-1], prompt["suffix"])
    ask("exactly", ids, prompt["suffix"], mode="exact")
    ask("another question", ids, "Question: Where is the head office of Jearhiond Union?\nAnswer:", mode="exact")

    _, answer = llm.generate_and_retain_output(
        "instruction", ids, query=prompt["suffix"], sampling_params=params, name="answer"
    )
    print(f"retained           {len(answer)} tokens as a chunk of type {answer.chunk_type.name}")
    stream = llm.generate_from_chunks(system.id, [*ids, "answer"], query=prompt["suffix"], stream=True)
    next(stream)
    deletion = llm.delete_chunk("answer")
    print(f"deleted in use     deferred: {deletion.deferred}, {deletion.num_bytes} bytes")
    del stream  # this aborts the request, which frees the chunk
    left = llm.list_chunks()
    print(f"left               {sum(info.num_bytes for info in left)} bytes in {len(left)} chunks")


def report(output: RequestOutput) -> str:
    metrics = output.metrics
    assert metrics is not None and metrics.first_token_time is not None and metrics.first_scheduled_time is not None
    ttft = 1000 * (metrics.first_token_time - metrics.first_scheduled_time)
    cached = output.num_cached_tokens or 0
    computed = len(output.prompt_token_ids) - cached
    return f"{computed} of {len(output.prompt_token_ids)} tokens computed, {ttft:.0f} ms:{output.outputs[0].text}"


if __name__ == "__main__":
    main()
