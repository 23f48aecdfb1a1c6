"""What users may say about compression, and what they are told when it cannot be."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from tests.engine.engines import DEMO, TINY_VOCABULARY, engine, feature, greedy, new_llm, run, tiny_model
from vllm_blend.config import EngineConfig
from vllm_blend.engine_args import EngineArgs
from vllm_blend.features.kv_compress.config import CompressionSettings, KVCompressConfig
from vllm_blend.features.kv_compress.extension import KVCompression
from vllm_blend.features.kv_compress.metrics import METRICS

PROMPT = {"prompt_token_ids": [(5 * i + 2) % TINY_VOCABULARY for i in range(30)]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target_compression_rate": 0.5, "max_cache_tokens": 64}, "target_compression_rate=0.5 and max_cache_tokens"),
        ({"target_compression_rate": 0.0}, r"target_compression_rate=0\.0 .* \(0, 1\]"),
        ({"target_compression_rate": 1.5}, r"target_compression_rate=1\.5 .* \(0, 1\]"),
        ({"max_cache_tokens": 20}, "max_cache_tokens=20 is below .* protected_window_size=32 and num_sinks=4"),
        ({"metric_collection_buffer_size": 33}, "protected_window_size=32 is below metric_collection_buffer_size=33"),
        ({"protected_window_size": 0}, "protected_window_size=0 must be a whole number of at least 1"),
        ({"num_sinks": -1}, "num_sinks=-1"),
        ({"kvc_interval": 0}, "kvc_interval=0"),
        ({"new_token_limit": 0}, "new_token_limit=0"),
        ({"max_kv_per_compression": 0}, "max_kv_per_compression=0"),
        ({"prefill_metric_collection_window_size": 0}, "prefill_metric_collection_window_size=0"),
        ({"kvc_metric": "guess"}, "kvc_metric='guess' is unknown: use one of .*keydiff"),
        ({"metric_aggregation": "L3"}, "metric_aggregation='L3' is unknown"),
        ({"kvc_allocation": "row"}, "kvc_allocation='row' is unknown"),
        ({"kvc_metric": ["knorm"]}, r"kvc_metric=\['knorm'\] must be a string"),
        (
            {"kvc_metric": "snapkv", "metric_aggregation": "L1-sum"},
            "metric_aggregation='L1-sum' means nothing to .*snap",
        ),
        ({"kvc_metric": "knorm", "metric_collection_buffer_size": 3}, "metric_collection_buffer_size=3 means nothing"),
        ({"enable_kvc": False, "max_cache_tokens": 64}, "max_cache_tokens=64, but the engine does not compress"),
        ({"cascade_attention": True}, "enable_kvc and cascade_attention exclude each other"),
        ({"offload_mode": "exact"}, "enable_kvc and offload_mode exclude each other"),
        ({"speculative_config": {"method": "ngram"}}, "enable_kvc and speculative_config exclude each other"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_loaded(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineArgs("nowhere", **({"enable_kvc": True} | arguments)).create_engine_config()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_compression_rate": 0.5, "max_cache_tokens": 64}, "both given"),
        ({"target_compression_rate": -1}, "target_compression_rate=-1"),
        ({"max_cache_tokens": 8}, "max_cache_tokens=8 is below"),
        ({"protected_window_size": 2}, "metric_collection_buffer_size=4"),
        ({"num_sinks": 1.5}, r"num_sinks=1\.5"),
        ({"compress_once": "yes"}, "compress_once='yes'"),
    ],
)
def test_invalid_options_of_a_request_leave_other_requests_alone(options: dict[str, Any], message: str) -> None:
    arguments = {"protected_window_size": 8, "num_sinks": 1, "metric_collection_buffer_size": 4}
    with engine(tiny_model("llama"), enable_kvc=True, **arguments) as llm:
        llm.llm_engine.add_request("good", PROMPT, greedy(4))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            llm.llm_engine.add_request("bad", PROMPT, greedy(4, **options))  # type: ignore[arg-type]
        finished = []
        while llm.llm_engine.has_unfinished_requests():
            finished += [output for output in llm.llm_engine.step() if output.finished]
        assert [output.request_id for output in finished] == ["good"]


def test_options_of_a_request_need_an_engine_that_compresses() -> None:
    with engine(tiny_model("llama")) as llm, pytest.raises(ValueError, match=r"max_cache_tokens.*enable_kvc=True"):
        run(llm, PROMPT, greedy(4, max_cache_tokens=64))


def test_attention_sinks_are_refused() -> None:
    with pytest.raises(ValueError, match="enable_kvc: the model has attention sinks"):
        new_llm(tiny_model("gpt_oss", sliding_window=96), enable_kvc=True)


def test_sliding_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="enable_kvc: the model has layers with a sliding window"):
        new_llm(tiny_model("mistral", sliding_window=20), enable_kvc=True)


def test_defaults_are_the_same_everywhere() -> None:
    made = EngineArgs(DEMO, enable_kvc=True).create_engine_config()
    assert made.feature(KVCompressConfig) == KVCompressConfig(enable_kvc=True)
    assert made.feature(KVCompressConfig).settings_of(greedy().compression) == CompressionSettings()
    assert EngineConfig(made.model).feature(KVCompressConfig) == KVCompressConfig()


def test_numbers_may_be_of_numpy() -> None:
    settings = CompressionSettings(max_cache_tokens=np.int64(64), num_sinks=np.int32(2))  # type: ignore[arg-type]
    assert (type(settings.max_cache_tokens), type(settings.num_sinks)) == (int, int)
    assert KVCompressConfig(kvc_interval=np.int64(8)).kvc_interval == 8  # type: ignore[arg-type]
    with engine(tiny_model("llama"), enable_kvc=True, protected_window_size=6, num_sinks=1) as llm:
        run(llm, PROMPT, greedy(4, target_compression_rate=np.float32(0.5), num_sinks=np.int64(2)))
        assert feature(llm.llm_engine, KVCompression).engine.num_evicted > 0


def test_every_setting_is_a_flag_with_its_default() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    made = EngineArgs.from_cli_args(parser.parse_args(["--model", DEMO, "--enable-kvc"])).create_engine_config()
    assert made.feature(KVCompressConfig) == KVCompressConfig(enable_kvc=True)
    own = {field.name: field.default for field in (*fields(KVCompressConfig), *fields(CompressionSettings))}
    del own["settings"]
    said = {action.dest: str(action.help) for action in parser._actions}
    for name, default in own.items():
        shown = said[name].partition(" (default: ")[2]
        assert shown == ("" if default is None else f"{default})"), said[name]
    flags = ["--max-cache-tokens", "64", "--num-sinks", "2", "--compress-once", "--kvc-allocation", "layer"]
    given = EngineArgs.from_cli_args(parser.parse_args(["--model", DEMO, "--enable-kvc", *flags]))
    settings = CompressionSettings(max_cache_tokens=64, num_sinks=2, compress_once=True)
    assert given.create_engine_config().feature(KVCompressConfig) == KVCompressConfig(
        True, settings, kvc_allocation="layer"
    )


def test_a_batch_with_a_bad_wish_answers_the_others() -> None:
    with engine(tiny_model("llama"), enable_kvc=True) as llm:
        own = [greedy(4), greedy(4, max_cache_tokens=8), greedy(4, target_compression_rate=0.5)]
        first, bad, last = run(llm, [PROMPT] * 3, own)
        assert first.error is None and last.error is None
        assert bad.error is not None and "max_cache_tokens=8 is below" in bad.error


def test_heads_compete_where_their_scores_can_be_compared() -> None:
    chosen = {name: KVCompressConfig(enable_kvc=True, kvc_metric=name).allocation for name in METRICS}
    assert chosen == {name: "global" if metric.comparable else "head" for name, metric in METRICS.items()}
    assert (chosen["kv_compress"], chosen["snapkv"], chosen["knorm"]) == ("global", "global", "head")
    assert KVCompressConfig(enable_kvc=True, kvc_metric="knorm", kvc_allocation="layer").allocation == "layer"


def test_a_request_goes_before_the_engine() -> None:
    config = KVCompressConfig(enable_kvc=True, settings=CompressionSettings(max_cache_tokens=64, num_sinks=2))
    own = config.settings_of(greedy(target_compression_rate=0.25, compress_once=True).compression)
    assert own == CompressionSettings(target_compression_rate=0.25, num_sinks=2, compress_once=True)


@pytest.mark.parametrize(
    ("settings", "tokens", "kept"),
    [
        (CompressionSettings(), 500, 500),
        (CompressionSettings(target_compression_rate=0.25), 400, 100),
        (CompressionSettings(target_compression_rate=0.25), 401, 101),
        (CompressionSettings(target_compression_rate=0.07), 700, 49),  # though 0.07 * 700 > 49 in floating point
        (CompressionSettings(target_compression_rate=0.01), 400, 36),  # the window and the sinks
        (CompressionSettings(target_compression_rate=0.01), 20, 20),
        (CompressionSettings(max_cache_tokens=64), 40, 40),
        (CompressionSettings(max_cache_tokens=64), 400, 64),
    ],
)
def test_how_much_is_kept(settings: CompressionSettings, tokens: int, kept: int) -> None:
    assert settings.kept_tokens(tokens) == kept
