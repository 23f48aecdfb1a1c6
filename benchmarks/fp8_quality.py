"""Measure what FP8 linear layers cost in quality, against the same model in bfloat16, on a GPU.

    bash scripts/build_cuda.sh && python -m benchmarks.fp8_quality [--datasets FILE ...] [--markdown FILE]

The demo model answers every question over all of its passages, greedily, in full and blended; blends reuse chunk KV
that the same model computed. `KL` is that of the first answer token's distribution, from bfloat16 to FP8, in nats, over
the whole vocabulary: mean and 99th percentile over the questions. `same answer` is the share of answers that are equal
word for word. For scale, `bfloat16 again` compares bfloat16 with itself prefilled in chunks of 256 tokens: rounding
alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers import BLENDS
from vllm_blend import LLM, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample
from vllm_blend.pipeline.datasets import Sample
from vllm_blend.pipeline.evaluate import best_score, exact_match, f1_score, first_line
from vllm_blend.pipeline.prompts import prompt_for

ROOT = Path(__file__).resolve().parents[1]
METHODS: dict[str, dict[str, Any]] = {"full prefill": {}, **BLENDS}


@dataclass(frozen=True)
class Answers:
    """The answers of one model in one way, by question."""

    texts: list[str]
    first: torch.Tensor  # [questions, vocabulary] float64 log-probabilities of the first token
    exact_match: float
    f1: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    data = [str(ROOT / "inputs" / name) for name in ("musique_s.json", "wikimqa_s.json")]
    parser.add_argument("--datasets", nargs="*", default=data)
    parser.add_argument("--model", default=str(ROOT / "inputs" / "demo-model"))
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args(argv)
    lines = [
        f"{date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}, model {Path(args.model).name}"
    ]
    for path in args.datasets:
        samples = [normalize_sample(raw, index) for index, raw in enumerate(load_dataset(path))]
        lines += ["", f"{Path(path).stem}, {len(samples)} questions", ""]
        lines += [
            "| method | weights | exact match | F1 | KL mean | KL p99 | same answer |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += table(args.model, path, samples)
    print("\n".join(lines))
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")


def table(model: str, dataset: str, samples: Sequence[Sample]) -> list[str]:
    answers = {weights: answer_all(model, dataset, samples, weights) for weights in ("bfloat16", "fp8")}
    again = answer_all(model, dataset, samples, "bfloat16", max_num_batched_tokens=256)
    rows = []
    for method, expected in answers["bfloat16"].items():
        rows.append(row(method, "bfloat16", expected, None))
        rows.append(row(method, "fp8", answers["fp8"][method], expected))
        if method in again:
            rows.append(row(method, "bfloat16 again", again[method], expected))
    return rows


def row(method: str, weights: str, found: Answers, expected: Answers | None) -> str:
    cells = [method, weights, f"{100 * found.exact_match:.1f}", f"{100 * found.f1:.1f}"]
    if expected is None:
        return f"| {' | '.join([*cells, '', '', ''])} |"
    kl = (expected.first.exp() * (expected.first - found.first)).sum(1)
    same = statistics.fmean(a == b for a, b in zip(found.texts, expected.texts, strict=True))
    return f"| {' | '.join([*cells, f'{kl.mean():.1e}', f'{kl.quantile(0.99):.1e}', f'{100 * same:.0f}%'])} |"


def answer_all(
    model: str, dataset: str, samples: Sequence[Sample], weights: str, max_num_batched_tokens: int | None = None
) -> dict[str, Answers]:
    """Return answers by method. With `max_num_batched_tokens`, only full prefill runs, in chunks of that many
    tokens."""
    found = {}
    common: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "enable_prefix_caching": False}
    common |= {"quantization": None if weights == "bfloat16" else weights, "num_gpu_blocks_override": 8192}
    for blending in (False, True):
        if blending and max_num_batched_tokens is not None:
            break
        limits: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": max_num_batched_tokens}
        llm = LLM(model, enable_blending=blending, blend_chunk_cache_gib=2, **common, **limits)
        for method, settings in METHODS.items():
            if bool(settings) is blending:
                prompts = [build_qa_prompt(sample, dataset) | settings for sample in samples]
                found[method] = answer(llm, dataset, samples, prompts)
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    return found


def answer(llm: LLM, dataset: str, samples: Sequence[Sample], prompts: list[Any]) -> Answers:
    vocabulary = llm.llm_engine.hf_config.vocab_size
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=vocabulary, detokenize=False)
    first = torch.empty(len(prompts), vocabulary, dtype=torch.float64)
    for index, output in enumerate(llm.generate(prompts, one, use_tqdm=False)):
        logprobs = output.outputs[0].logprobs
        if output.error or logprobs is None:
            raise RuntimeError(output.error or "no log-probabilities came back")
        ids, values = zip(*((token, entry.logprob) for token, entry in logprobs[0].items()), strict=True)
        first[index, list(ids)] = torch.tensor(values, dtype=torch.float64)
    params = SamplingParams(temperature=0, max_tokens=prompt_for(dataset).max_tokens, stop=["\n"])
    texts = [first_line(output.outputs[0].text) for output in llm.generate(prompts, params, use_tqdm=False)]
    pairs = list(zip(texts, (list(sample.answers) for sample in samples), strict=True))
    exact, f1 = (statistics.fmean(best_score(score, *pair) for pair in pairs) for score in (exact_match, f1_score))
    return Answers(texts, first, exact, f1)


if __name__ == "__main__":
    main()
