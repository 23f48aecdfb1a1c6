"""Run all stages in one process, from one configuration: retrieve, store the KV, answer.

    python -m vllm_blend.pipeline.run_pipeline --config configs/musique.yaml --set decode.blend_recompute_ratio=0.3

writes what the single stages write, to the same places.
"""

from __future__ import annotations

import argparse
import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from vllm_blend.blend.selectors import make_selector
from vllm_blend.features.kv_compress.config import CompressionSettings, KVCompressConfig
from vllm_blend.pipeline import build_kv_cache, speculative_decode
from vllm_blend.pipeline.config import (
    DecodeConfig,
    PrefillConfig,
    RetrievalConfig,
    add_dataset_flags,
    dataset_settings,
    load_config,
    make_section,
)
from vllm_blend.pipeline.retrieval import run_retrieval
from vllm_blend.pipeline.stage_inputs import find_asking
from vllm_blend.pipeline.timeline import WITHOUT, load_pyplot

Settings = dict[str, dict[str, Any]]


def run_pipeline(retrieval: RetrievalConfig, prefill: PrefillConfig, decode: DecodeConfig) -> dict[str, Any]:
    """Return {"retrieval", "prefill", "decode"}: what each stage wrote. Prefill and decode use what this retrieval
    found."""
    make_selector(decode.blend_selector)  # refuse early what the last stage would refuse
    kept = CompressionSettings(decode.target_compression_rate or None, decode.max_cache_tokens or None)
    KVCompressConfig(decode.enable_kvc, kept, kvc_metric=decode.kvc_metric)
    find_asking(retrieval, retrieval.dataset_name, build_kv_cache.read_tokenizer(prefill.model_id))
    if decode.timeline:
        load_pyplot(WITHOUT)
    if prefill.pages != decode.pages:
        raise ValueError(f"prefill.pages={prefill.pages} and decode.pages={decode.pages}: give both the same")
    prefill = replace(prefill, retrieval_json=str(retrieval.output_path))
    decode = replace(decode, retrieval_json=str(retrieval.output_path))
    outputs = {"retrieval": run_retrieval(retrieval)}
    outputs["prefill"] = build_kv_cache.build_kv_cache(prefill, retrieval)
    gc.collect()  # the first engine's memory, before the second one measures what is free
    outputs["decode"] = speculative_decode.speculative_decode(decode, retrieval)
    return outputs


def apply_settings(settings: Settings, assignments: Sequence[str]) -> Settings:
    """Return `settings` with "section.key=value" applied, the value read as YAML. Raises ValueError that shows what is
    wrong."""
    changed = {name: dict(values) for name, values in settings.items()}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and key) or section not in changed:
            raise ValueError(f"--set {assignment}: write section.key=value with a section of {', '.join(changed)}")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {assignment}: {text!r} is not a YAML value ({error})") from error
        changed[section][key] = "" if value is None else value
    return changed


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Run retrieval, KV caching and decoding in one process.")
    add = parser.add_argument
    add(
        "--config",
        help="YAML file of all stages, such as configs/musique.yaml; without it every setting has its default",
    )
    add_dataset_flags(parser)
    add("--model-id", help="model of the prefill and decode stages")
    add("--top-k", type=int, help="passages to retrieve, and chunks of a sample for the GPU")
    add("--max-samples", type=int, help="use only the first samples; 0 for all")
    add("--results-dir", help="folder for the outputs of all stages, in place of results/")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting; may be repeated")
    args = parser.parse_args(argv)
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it turns debug output on when imported
    try:
        settings = apply_settings(_with_flags(load_config(args.config), args), args.set)
        retrieval = make_section(RetrievalConfig, "retrieval", settings["retrieval"])
        prefill = make_section(PrefillConfig, "prefill", settings["prefill"])
        decode = make_section(DecodeConfig, "decode", settings["decode"])
        outputs = run_pipeline(retrieval, prefill, decode)
    except (ImportError, OSError, ValueError) as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    recall = outputs["retrieval"]["summary"]["recall"]
    known = "" if recall is None else f", recall@{retrieval.top_k} {recall:.3f}"
    print(f"{outputs['retrieval']['summary']['samples']} questions{known}\n  {retrieval.output_path}")
    print(build_kv_cache.report(outputs["prefill"], prefill))
    print(speculative_decode.report(outputs["decode"], decode))


def _with_flags(settings: Settings, args: argparse.Namespace) -> Settings:
    settings["retrieval"] = dataset_settings(settings["retrieval"], args)
    if args.model_id:
        settings["prefill"]["model_id"] = settings["decode"]["model_id"] = args.model_id
    if args.top_k is not None:
        settings["retrieval"]["top_k"] = settings["prefill"]["top_k_gpu"] = args.top_k
    if args.max_samples is not None:
        for section in settings.values():
            section["max_samples"] = args.max_samples
    if args.results_dir:
        root = Path(args.results_dir)
        settings["retrieval"] |= {"output_dir": str(root / "retrieval"), "index_dir": str(root / "retrieval/indexes")}
        settings["prefill"]["output_dir"] = settings["decode"]["load_cache_dir"] = str(root / "kv_caches")
        settings["decode"]["output"] = str(root / "decoding/speculative_trace.json")
    return settings


if __name__ == "__main__":
    main()
