"""Measure what a second question gives up over pages that were repaired for another one: exact match, in percent.

    OMP_NUM_THREADS=1 python -m benchmarks.retained_answers

Every question of a data set is asked over its passages as registered chunks: exactly, by plain reuse, and by two rules.
"own": the context is blended for the question that is asked. "retained": for that of the seventh sample after it, whose
pages then serve this one. Chunks are encoded after BOS alone, or after BOS and the system prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from vllm_blend import ChunkedLLM, RequestOutput, SamplingParams
from vllm_blend.pipeline import build_qa_prompt, load_dataset, normalize_sample
from vllm_blend.pipeline.evaluate import score_prediction

RULES = ("question_attention", "value_deviation")
FURTHER = 7  # samples further on is the other question
HEAD = "| chunks encoded after | exact | reuse | question attention, own | retained | value deviation, own | retained |"


def measure(llm: ChunkedLLM, samples: Sequence[Any], prompts: Sequence[Any], after: str | None, ratio: float) -> str:
    """Return the table's row. Raises RuntimeError if pages are not retained, or are computed where they should be
    retained."""
    params = SamplingParams(temperature=0, max_tokens=24, stop=["\n"])
    scores: dict[str, list[float]] = {}
    for number, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
        chunks = [llm.register_chunk(text, after=after) for text in prompt["chunks"]]
        other = prompts[(number + FURTHER) % len(prompts)]["suffix"]

        def ask(question: str, **options: Any) -> RequestOutput:
            output: RequestOutput = llm.generate_from_chunks(
                "instruction",
                chunks,  # noqa: B023
                query=question,
                sampling_params=params,
                **options,
            )
            return output

        def note(name: str, output: RequestOutput) -> None:
            score = score_prediction(output.outputs[0].text, list(sample.answers))  # noqa: B023
            scores.setdefault(name, []).append(score.exact_match)

        note("exact", ask(prompt["suffix"], mode="exact"))
        note("reuse", ask(prompt["suffix"], mode="reuse", retain=False))
        for rule in RULES:
            blend: dict[str, Any] = {"selector": rule, "recompute_ratio": ratio}
            note(f"{rule}, own", ask(prompt["suffix"], retain=False, **blend))
            ask(other, retain=True, **blend)
            second = ask(prompt["suffix"], retain=True, **blend)
            if second.blend is None or not second.blend.retained:
                raise RuntimeError(f"sample {number}: the pages of {rule} were not retained")
            note(f"{rule}, retained", second)
        for chunk in chunks:
            llm.delete_chunk(chunk)
    label = "BOS" if after is None else "BOS and the system prompt"
    names = ["exact", "reuse", *(f"{rule}, {way}" for rule in RULES for way in ("own", "retained"))]
    return f"| {label} | {' | '.join(f'{100 * sum(scores[name]) / len(samples):.1f}' for name in names)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="inputs/demo-model")
    parser.add_argument("--dataset", default="inputs/musique_s.json")
    parser.add_argument("--samples", type=int, default=150, help="the first ones (default: %(default)s)")
    parser.add_argument("--ratio", type=float, default=0.15, help="share of the context (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(argv)
    samples = [normalize_sample(raw) for raw in load_dataset(args.dataset)[: args.samples]]
    prompts: list[Any] = [build_qa_prompt(sample, "musique") for sample in samples]
    llm = ChunkedLLM(args.model, device=args.device)
    llm.register_chunk(prompts[0]["prefix"], "SYSTEM_PROMPT", name="instruction")
    print(HEAD, "|---" * HEAD.count(" | ") + "|---|", sep="\n")
    for after in (None, "instruction"):
        print(measure(llm, samples, prompts, after, args.ratio), flush=True)


if __name__ == "__main__":
    main()
