"""Time the engine against Hugging Face transformers and against itself, on the CPU, in one process.

    python -m benchmarks.engine_cpu

Prints medians and ratios: full prefill and the steps of greedy decoding against the `generate` of transformers, a blend
at 15% against this engine's full prefill, and the engine's overhead per step (everything outside the model's forward).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.samples import record
from vllm_blend import LLM, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inputs/demo-model")
    parser.add_argument("--dataset", default="inputs/musique_s.json")
    parser.add_argument("--prompt-tokens", type=int, default=900)
    parser.add_argument("--decode-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args(argv)

    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    plain = LLM(args.model, enable_prefix_caching=False)
    blending = LLM(args.model, enable_blending=True)
    prompts = long_prompts(args.dataset, blending, args.prompt_tokens, 16)
    ids = [blending_ids(prompt) for prompt in prompts]
    print(f"prompt of {len(ids[0])} tokens, {torch.get_num_threads()} threads, torch {torch.__version__}")

    first = SamplingParams(temperature=0, max_tokens=1)
    hf = median(lambda: hf_generate(reference, ids[:1], 1), args.repeats)
    ours = median(lambda: generate(plain, ids[:1], first), args.repeats)
    row("full prefill, whole call", hf, ours, "HF")
    full = ttft("full prefill", plain, ids, first, args.repeats)
    for selector, ratio in (("question_attention", 0.15), ("value_deviation", 0.15), ("none", None)):
        asked = [
            p | {"blend_selector": selector} | ({} if ratio is None else {"blend_recompute_ratio": ratio})
            for p in prompts
        ]
        generate(blending, asked, first)  # stores the chunks
        name = f"{selector} {ratio or 0:.0%}"
        row(f"time to first token, {name}", full, ttft(name, blending, asked, first, args.repeats), "own full")

    for batch in (1, 16):
        name, sides = f"decode, batch {batch}, per step", {}
        for who, steps in (("HF", partial(hf_decode_steps, reference)), ("ours", partial(decode_steps, plain))):
            times = steps(ids[:batch], args.decode_tokens)
            record(f"{name}, {who}", times)
            sides[who] = statistics.median(times)
        row(name, sides["HF"], sides["ours"], "HF")
    print(f"step overhead outside the model, batch 1: {overhead(plain, ids[0]) * 1e3:.3f} ms")


def long_prompts(dataset: str, llm: LLM, tokens: int, count: int) -> list[dict[str, Any]]:
    """Return chunked prompts of just under `tokens` tokens: passages of several samples, and a question at the end."""
    tokenizer = llm.get_tokenizer()

    def encode(text: Any) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    pieces = [build_qa_prompt(normalize_sample(s, i), "musique") for i, s in enumerate(load_dataset(dataset))]
    chunks = [encode(chunk) for piece in pieces for chunk in piece["chunks"]]
    prefix = [tokenizer.bos_token_id, *encode(pieces[0]["prefix"])]
    prompts = []
    for index in range(count):
        suffix = encode(pieces[index]["suffix"])
        room, chosen, start = tokens - len(prefix) - len(suffix), [], 11 * index
        while start < len(chunks) and len(chunks[start]) <= room:
            chosen.append(chunks[start])
            room -= len(chunks[start])
            start += 1
        prompts.append({"prefix": prefix, "chunks": chosen, "suffix": suffix})
    return prompts


def blending_ids(prompt: dict[str, Any]) -> list[int]:
    return [*prompt["prefix"], *(i for chunk in prompt["chunks"] for i in chunk), *prompt["suffix"]]


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


def generate(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[Any]:
    return list(llm.generate(prompts, params, use_tqdm=False))


def decode_steps(
    llm: LLM, prompts: list[list[int]], tokens: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Return the seconds of each step in which all requests decode: each has its first token, and none has ended."""
    engine, begun, times, has_ended = llm.llm_engine, set[str](), list[float](), False
    for index, ids in enumerate(prompts):
        engine.add_request(f"decode-{index}", {"prompt_token_ids": ids}, greedy(tokens))
    while engine.has_unfinished_requests():
        all_decode = len(begun) == len(prompts) and not has_ended
        start = clock()
        outputs = engine.step()
        if all_decode:
            times.append(clock() - start)
        begun.update(output.request_id for output in outputs)
        has_ended |= any(output.finished for output in outputs)
    return times


def hf_decode_steps(model: Any, ids: list[list[int]], tokens: int) -> list[float]:
    """Return the seconds between one token and the next of the whole batch."""
    ends: list[float] = []

    def note(input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        ends.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)

    hf_generate(model, ids, tokens, stopping_criteria=[note])
    return [end - start for start, end in pairwise(ends)]


def hf_generate(model: Any, ids: list[list[int]], tokens: int, **options: Any) -> None:
    longest = max(map(len, ids))
    padded = torch.tensor([[0] * (longest - len(i)) + i for i in ids])
    mask = torch.tensor([[0] * (longest - len(i)) + [1] * len(i) for i in ids])
    with torch.inference_mode():
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        model.generate(padded, attention_mask=mask, do_sample=False, pad_token_id=2, **length, **options)


def ttft(name: str, llm: LLM, prompts: list[Any], params: SamplingParams, repeats: int) -> float:
    times: list[float] = []
    for index in range(repeats + 1):
        metrics = generate(llm, [prompts[index % len(prompts)]], params)[0].metrics
        times.append(metrics.first_token_time - metrics.first_scheduled_time)
    record(f"time to first token, {name}", times[1:])
    return statistics.median(times[1:])


def overhead(llm: LLM, ids: list[int]) -> float:
    """Return the median seconds of a decode step that are not spent in the model."""
    runner = llm.llm_engine.model_executor.driver_worker.model_runner
    inside: list[float] = []
    model = runner.model.get_submodule("")
    engine, outside = llm.llm_engine, []
    hook = model.register_forward_pre_hook(lambda *_: inside.append(-time.perf_counter()))
    after = model.register_forward_hook(lambda *_: inside.append(inside.pop() + time.perf_counter()))
    engine.add_request("overhead", {"prompt_token_ids": ids}, greedy(40))
    engine.step()
    while engine.has_unfinished_requests():
        inside.clear()
        start = time.perf_counter()
        engine.step()
        outside.append(time.perf_counter() - start - sum(inside))
    hook.remove()
    after.remove()
    return statistics.median(outside)


def median(run: Callable[[], Any], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def row(name: str, theirs: float, ours: float, who: str) -> None:
    print(
        f"{name:45s} {who} {theirs * 1e3:8.1f} ms   ours {ours * 1e3:8.1f} ms   ratio {theirs / ours:5.2f}", flush=True
    )


if __name__ == "__main__":
    main()
