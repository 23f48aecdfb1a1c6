"""Compare full prefill, plain reuse and blending: answers, time to first token, and what was recomputed.

    python -m benchmarks.compare --dataset inputs/musique_s.json

prints the tables that docs/quickstart.md quotes, and writes results/comparison/<dataset>.json. Every method answers the
same prompts: all passages of a sample, in order, then the question. Time to first token (TTFT) is measured one request
at a time, after a warm-up, from the first step that works on a request to its first token. Full prefill runs in an
engine of its own, without prefix caching and blending; the other methods find the KV of instruction and passages in
memory, and place, choose and recompute within the measured time. Each passage is stored as if it stood alone. The
methods take turns on every prompt, in rotating order.
"""

from __future__ import annotations

import argparse
import logging
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.engine_args import EngineArgs
from vllm_blend.inputs import ChunkedPrompt, PromptType
from vllm_blend.outputs import RequestOutput
from vllm_blend.pipeline.build_kv_cache import read_tokenizer
from vllm_blend.pipeline.chunk_cache import ChunkCache
from vllm_blend.pipeline.config import RetrievalConfig, add_dataset_flags, dataset_settings, make_section
from vllm_blend.pipeline.evaluate import format_table, score_prediction
from vllm_blend.pipeline.files import write_json
from vllm_blend.pipeline.stage_inputs import PassageChunk, StageInput, read_stage_input
from vllm_blend.quality.intervals import ratio_of_medians
from vllm_blend.quality.questions import joined_ids
from vllm_blend.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

WARM_UP_ROUNDS = 3
NAMES = {"f1": "F1", "rouge_l": "Rouge-L"}


@dataclass
class Method:
    """A way to prefill, and its measurements. `selector` is None for full prefill without any reuse."""

    name: str
    selector: str | None
    ratio: float | None = None
    ttft: list[float] = field(default_factory=list)  # seconds from the first step
    latency: list[float] = field(default_factory=list)  # seconds from the arrival
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    answers: list[dict[str, Any]] = field(default_factory=list)

    def prompt(self, pieces: ChunkedPrompt) -> ChunkedPrompt:
        """Return `pieces` with the settings of this method's blend."""
        prompt = pieces.copy()
        if self.selector is not None:
            prompt["blend_selector"] = self.selector
        if self.ratio is not None:
            prompt["blend_recompute_ratio"] = self.ratio
        return prompt

    def record(self, output: RequestOutput) -> None:
        metrics = output.metrics
        assert metrics is not None and metrics.time_in_prefill is not None and metrics.first_token_latency is not None
        self.ttft.append(metrics.time_in_prefill)
        self.latency.append(metrics.first_token_latency)
        self.prompt_tokens += len(output.prompt_token_ids)
        blend = output.blend
        self.recomputed_tokens += len(output.prompt_token_ids) if blend is None else blend.num_recomputed_tokens


def make_methods(ratio: float) -> list[Method]:
    """Return the methods. Full prefill is the first: the others are compared with it."""
    percent = f"{100 * ratio:g}%"
    return [
        Method("full prefill", None),
        Method("plain reuse", "none"),
        Method(f"blend, question attention, {percent} (the default rule)", "question_attention", ratio),
        Method(f"blend, value deviation, {percent} (CacheBlend's rule)", "value_deviation", ratio),
    ]


class Bench:
    """Two engines with one model, and the prompts to run on them."""

    def __init__(self, stage: StageInput, model: str, dtype: str, device: str, cache_dir: Path) -> None:
        self.stage = stage
        common: dict[str, Any] = {"model": model, "dtype": dtype, "device": device, "enable_prefix_caching": False}
        self.plain = LLMEngine.from_engine_args(EngineArgs(**common))
        self.blending = LLMEngine.from_engine_args(
            EngineArgs(**common, enable_blending=True, blend_encoding_context="prefix")
        )
        self.cache = ChunkCache(self.blending, cache_dir, stage.asking.prefix, stage.prefix_id)

    def pieces(self, chunks: Sequence[PassageChunk], question: str) -> ChunkedPrompt:
        asking = self.stage.asking
        return {
            "prefix": asking.prefix,
            "chunks": [chunk.text for chunk in chunks],
            "suffix": asking.suffix(question),
        }

    def ready(self, chunks: Sequence[PassageChunk]) -> None:
        """Bring the KV of `chunks` into memory before anything is timed: load it from the folders, or compute it."""
        self.cache.load(chunks)
        self.blending.encode_chunks(self.stage.asking.prefix, [chunk.text for chunk in chunks])

    def check_length(self, pieces: ChunkedPrompt) -> None:
        """Raise ValueError if the model cannot hold the prompt and one more token."""
        length = len(joined_ids(self.blending, pieces))
        if length >= self.blending.max_model_len:
            raise ValueError(f"its prompt has {length} tokens, max_model_len is {self.blending.max_model_len}")

    def ask(self, method: Method, pieces: ChunkedPrompt, max_tokens: int) -> RequestOutput:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=["\n"])
        engine = self.blending
        prompt: PromptType = method.prompt(pieces)
        if method.selector is None:
            engine, prompt = self.plain, {"prompt_token_ids": joined_ids(self.blending, pieces)}
        engine.add_request("0", prompt, params, final_only=True)
        while engine.has_unfinished_requests():
            for output in engine.step():
                return output
        raise RuntimeError("the engine stopped without an answer")

    def long_prompt(self, start: int, tokens: int) -> list[PassageChunk]:
        """Return passages of sample `start` and of those after it, as many as fit `tokens` prompt tokens with the
        question."""
        samples = self.stage.samples
        question = self.stage.asking.suffix(samples[start].sample.question)
        prefix, ids = self.blending.identify_chunks(self.stage.asking.prefix, [question])
        length = len(ids[0].token_ids) + (len(prefix.token_ids) if prefix is not None else 0)
        chosen: list[PassageChunk] = []
        for offset in range(len(samples)):
            chunks = samples[(start + offset) % len(samples)].chunks
            _, ids = self.blending.identify_chunks(self.stage.asking.prefix, [chunk.text for chunk in chunks])
            for chunk, chunk_id in zip(chunks, ids, strict=True):
                if length + len(chunk_id.token_ids) > tokens:
                    return chosen
                chosen.append(chunk)
                length += len(chunk_id.token_ids)
        return chosen


def compare_answers(bench: Bench, methods: Sequence[Method]) -> list[str]:
    """Let every method answer every sample over all of its passages. Returns the samples that no prompt can hold."""
    left_out: list[str] = []
    warm = False
    for index, sample in enumerate(tqdm(bench.stage.samples, desc="compare", unit="sample")):
        name, pieces = sample.sample.sample_id, bench.pieces(sample.chunks, sample.sample.question)
        try:
            bench.check_length(pieces)
        except ValueError as error:
            logger.warning("%s is left out: %s", name, error)
            left_out.append(name)
            continue
        bench.ready(sample.chunks)
        if not warm:
            _warm_up(bench, methods, pieces)
            warm = True
        for method in _rotated(methods, index):
            output = bench.ask(method, pieces, bench.stage.asking.max_tokens)
            method.record(output)
            text = output.outputs[0].text
            scores = asdict(score_prediction(text, list(sample.sample.answers)))
            method.answers.append({"id": name, "prediction": text, **scores})
    if not warm:
        raise ValueError(f"none of the {len(left_out)} samples fits the model's {bench.plain.max_model_len} tokens")
    return left_out


def compare_long(bench: Bench, methods: Sequence[Method], count: int, tokens: int) -> None:
    """Let every method prefill `count` prompts of about `tokens` tokens, and generate one token."""
    for index in tqdm(range(count), desc="long prompts", unit="prompt"):
        start = index % len(bench.stage.samples)
        chunks = bench.long_prompt(start, tokens)
        bench.ready(chunks)
        pieces = bench.pieces(chunks, bench.stage.samples[start].sample.question)
        if index == 0:
            _warm_up(bench, methods, pieces)
        for method in _rotated(methods, index):
            method.record(bench.ask(method, pieces, 1))


def _warm_up(bench: Bench, methods: Sequence[Method], pieces: ChunkedPrompt) -> None:
    for _ in range(WARM_UP_ROUNDS):
        for method in methods:
            bench.ask(method, pieces, 2)


def _rotated(methods: Sequence[Method], by: int) -> list[Method]:
    by %= len(methods)
    return [*methods[by:], *methods[:by]]


def make_rows(methods: Sequence[Method]) -> list[dict[str, Any]]:
    """Return a row of plain numbers per method: scores and shares from 0 to 1, times in seconds, and all times to first
    token."""
    full = statistics.median(methods[0].ttft)
    rows = []
    for method in methods:
        median = statistics.median(method.ttft)
        row: dict[str, Any] = {"method": method.name, "prompts": len(method.ttft)}
        for name in ("f1", "exact_match", "rouge_l") if method.answers else ():
            row[name] = statistics.fmean(answer[name] for answer in method.answers)
        row |= {"ttft_median_s": median, "ttft_speedup": full / median}
        speedup = ratio_of_medians(methods[0].ttft, method.ttft)
        row["ttft_speedup_low"], row["ttft_speedup_high"] = speedup.low, speedup.high
        row["ttft_s"] = [round(seconds, 6) for seconds in method.ttft]
        row |= {"arrival_to_first_token_median_s": statistics.median(method.latency)}
        row |= {"prompt_tokens": method.prompt_tokens, "recomputed_tokens": method.recomputed_tokens}
        rows.append(row | {"recomputed_share": method.recomputed_tokens / method.prompt_tokens})
    return rows


def render_table(rows: Sequence[dict[str, Any]], metric: str) -> str:
    """Return the rows as a Markdown table, shares in percent. `metric` is the data set's score beside exact match."""
    cells = []
    for row in rows:
        scores = {NAMES[metric]: row[metric], "exact match": row["exact_match"]} if metric in row else {}
        low, high = f"{row['ttft_speedup_low']:.1f}", f"{row['ttft_speedup_high']:.1f}"
        interval = "" if row is rows[0] else f", {low} to {high}"
        ttft = f"{1000 * row['ttft_median_s']:.1f} ms ({row['ttft_speedup']:.1f}x{interval})"
        times = {"TTFT": ttft, "from arrival": f"{1000 * row['arrival_to_first_token_median_s']:.1f} ms"}
        cells.append({"method": row["method"], **scores, **times, "tokens computed, %": row["recomputed_share"]})
    return format_table(cells)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Run both comparisons; write and return the results."""
    retrieval = make_section(RetrievalConfig, "retrieval", dataset_settings({}, args))
    stage = read_stage_input(retrieval, args.dataset, args.max_samples, read_tokenizer(args.model_id))
    bench = Bench(stage, args.model_id, args.dtype, args.device, Path(args.load_cache_dir))
    answers, long = make_methods(args.blend_recompute_ratio), make_methods(args.blend_recompute_ratio)
    left_out = compare_answers(bench, answers)
    if args.long_prompts:
        compare_long(bench, long, args.long_prompts, args.long_tokens)
    output = {
        "dataset_name": stage.dataset_name,
        "metric": stage.asking.style.metric,
        "model": asdict(bench.plain.fingerprint),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "chunks": dict(bench.cache.counts),
        "left_out": left_out,
        "rows": make_rows(answers),
        "long_rows": make_rows(long) if args.long_prompts else [],
        "answers": {method.name: method.answers for method in answers},
    }
    write_json(args.output or Path("results/comparison") / f"{stage.dataset_name}.json", output)
    return output


def report(output: dict[str, Any], metric: str) -> str:
    """Return both tables as text."""
    rows, long = output["rows"], output["long_rows"]
    mean = rows[0]["prompt_tokens"] / rows[0]["prompts"]
    text = f"{output['dataset_name']}: {rows[0]['prompts']} questions, {mean:.0f} prompt tokens on average"
    text += f"; {len(output['left_out'])} left out as too long\n\n" if output["left_out"] else "\n\n"
    text += render_table(rows, metric)
    if long:
        mean = long[0]["prompt_tokens"] / long[0]["prompts"]
        text += f"\n\nLonger prompts, timing only: {long[0]['prompts']} prompts, {mean:.0f} tokens on average\n\n"
        text += render_table(long, metric)
    return text + (
        "\n\nTTFT: median time from the first step that works on a request to its first token, one request at a time,\n"
        "after a warm-up, with the passages' KV already in memory; in brackets, full prefill's time divided by it,\n"
        "and the 95% interval of that (a bootstrap over the prompts), which other work on the machine may exceed.\n"
        "From arrival: the same with the time before that step, in which the prompt is tokenized and planned.\n"
        "Full prefill: no prefix caching, no blending; it is given token ids, the others text.\n"
        "Tokens computed: share of the prompt that went through the model, the question included.\n"
        f"{output['threads']} threads, torch {output['torch']}, {output['model']['dtype']}."
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add_dataset_flags(parser)
    parser.set_defaults(dataset="inputs/musique_s.json")
    add("--model-id", default="inputs/demo-model", help="model directory or hub id (default: %(default)s)")
    add("--dtype", default="auto", help="data type of weights and KV (default: %(default)s)")
    add("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    add("--load-cache-dir", default="results/kv_caches", help="folder with the chunks' KV (default: %(default)s)")
    add("--blend-recompute-ratio", type=float, default=0.15, help="share to recompute (default: %(default)s)")
    add("--max-samples", type=int, default=0, help="use only the first samples; 0 for all (default: %(default)s)")
    add("--long-prompts", type=int, default=20, help="prompts of joined samples, 0 for none (default: %(default)s)")
    add("--long-tokens", type=int, default=900, help="the most tokens of such a prompt (default: %(default)s)")
    add("--output", type=Path, help="JSON file to write (default: results/comparison/<dataset>.json)")
    args = parser.parse_args(argv)
    try:
        output = compare(args)
    except (OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    print(report(output, output["metric"]))
    print(f"  {args.output or Path('results/comparison') / (output['dataset_name'] + '.json')}")


if __name__ == "__main__":
    main()
