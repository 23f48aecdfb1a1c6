"""Ask a question about some text files, with their KV computed before: `python -m lmcache_vllm --help`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from vllm_blend.command_line import given
from vllm_blend.engine_args import OPTIONS, EngineArgs
from vllm_blend.lmcache.llm import LLM, close_lmcache_engine
from vllm_blend.lmcache.precompute import OfflineKVPreCompute
from vllm_blend.lmcache.prompts import combine_input_prompt_chunks
from vllm_blend.sampling_params import SamplingParams


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m lmcache_vllm",
        description="Precompute the KV of text files, blend it into a prompt, and print the answer and the time to its "
        "first token. LMCACHE_CONFIG_FILE names the configuration.",
    )
    parser.add_argument("texts", nargs="+", type=_text, metavar="FILE", help="texts, in the order of the prompt")
    parser.add_argument("--instruction", default="", help="text before the texts")
    parser.add_argument("--question", required=True, help="text after them")
    parser.add_argument("--max-tokens", type=int, default=30, help="longest answer, in tokens")
    parser.add_argument("--stop", action="append", default=[], help="text that ends the answer; may be repeated")
    return EngineArgs.add_cli_args(parser)


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read as text: {error}") from error


def main(arguments: Sequence[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    llm = LLM(**given(options, [*OPTIONS]))
    precompute = OfflineKVPreCompute(llm)
    for text in options.texts:
        precompute.precompute_kv(text)
    prompt = combine_input_prompt_chunks([options.instruction, *options.texts, options.question])
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, stop=options.stop)
    [output] = llm.generate(prompt, params, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None
    reused = output.num_cached_tokens or 0
    print(f"Newly generated text: {output.outputs[0].text!r}")
    print(
        f"Time to first token: {metrics.time_in_prefill:.3f} seconds ({metrics.first_token_latency:.3f} from arrival)"
    )
    print(f"Tokens reused: {reused} of {len(output.prompt_token_ids)}")
    close_lmcache_engine()
