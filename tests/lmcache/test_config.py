"""LMCache's configuration as arguments of the engine: every key, wrong values, contradictions, unknown keys."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests import settings
from vllm_blend.engine_args import EngineArgs
from vllm_blend.lmcache.config import LMCacheConfig, load_config

ON = "enable_blending: true\n"
DEFAULTS = {"enable_blending": True, "blend_min_tokens": 256, "blend_selector": "question_attention"}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def load(text: str | bytes) -> LMCacheConfig:
        path = tmp_path / "kv.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_config({"LMCACHE_CONFIG_FILE": str(path)})

    return load


def test_the_configuration_of_lmcaches_own_example(read: Any) -> None:
    config = read('chunk_size: 256\nlocal_device: "cpu"\n\n# Enables KV blending\nenable_blending: True\n')
    assert config.enable_blending and config.separator == "[BLEND_SEP]" and config.unknown == ()
    assert config.engine_args == DEFAULTS | {"blend_chunk_device": "cpu"}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("blend_recompute_ratio: 0.2", {"blend_recompute_ratio": 0.2}),
        ("blend_recompute_ratios: 0.2", {"blend_recompute_ratio": 0.2}),
        ("blend_recompute_ratios: [1]", {"blend_recompute_ratio": 1}),
        ("blend_recompute_ratio: 0.2\nblend_recompute_ratios: [0.2]", {"blend_recompute_ratio": 0.2}),
        ("blend_check_layers: 1", {"blend_check_layers": [1], "blend_selector": "value_deviation"}),
        (
            "blend_check_layers: [1, 3]\nblend_recompute_ratios: 0.3, 0.15",
            {
                "blend_check_layers": [1, 3],
                "blend_recompute_ratios": [0.3, 0.15],
                "blend_selector": "value_deviation",
            },
        ),
        ("blend_min_tokens: 0", {"blend_min_tokens": 0}),
        ("local_device: cuda", {"blend_chunk_device": "cuda"}),
        ("local_device: null", {}),
        ("local_device: /var/kv", {"chunk_store_path": "/var/kv"}),
        ("local_device: file:///var/kv/\nlocal_disk: /var/kv/", {"chunk_store_path": "/var/kv/"}),
        ("local_device: file://kv/", {"chunk_store_path": "kv/"}),
        ("local_cpu: true\nlocal_device: cpu", {"blend_chunk_device": "cpu"}),
        ("local_cpu: true", {"blend_chunk_device": "cpu"}),
        ("local_cpu: false", {}),
        ("max_local_cpu_size: 2.5", {"blend_chunk_cache_gib": 2.5}),
        ("max_local_cache_size: 3", {"blend_chunk_cache_gib": 3}),
        ("local_device: /kv\nmax_local_cache_size: 3", {"chunk_store_path": "/kv", "chunk_store_gib": 3}),
        ('local_disk: "file:///var/kv/"', {"chunk_store_path": "/var/kv/"}),
        ("local_disk: /kv\nmax_local_disk_size: 9", {"chunk_store_path": "/kv", "chunk_store_gib": 9}),
        ("local_disk: null\nmax_local_disk_size: 0", {}),
        ("remote_url: redis://host:6379", {"chunk_store_url": "redis://host:6379"}),
        ("remote_url: null\nremote_serde: naive", {}),
        ("use_layerwise: true\nchunk_size: 64\nblend_add_special_in_precomp: false", {}),
    ],
)
def test_every_key_means_arguments_of_the_engine(read: Any, text: str, arguments: dict[str, Any]) -> None:
    config = read(ON + text)
    assert config.engine_args == DEFAULTS | arguments
    assert config.unknown == config.idle == ()
    EngineArgs(model="m", **config.engine_args).create_engine_config()  # which checks them too


def test_the_separator_has_two_names(read: Any) -> None:
    assert read(ON + 'blend_separator: " # # "').separator == " # # "
    assert read(ON + 'blend_special_str: "<sep>"').separator == "<sep>"
    assert read(ON + 'blend_separator: "<sep>"\nblend_special_str: "<sep>"').separator == "<sep>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blend_separator: a\nblend_special_str: b", "blend_separator='a' and blend_special_str='b' contradict"),
        (
            "blend_recompute_ratio: 0.1\nblend_recompute_ratios: 0.2",
            "blend_recompute_ratio=0.1 and blend_recompute",
        ),
        ("blend_recompute_ratios: [0.2, 0.1]", "blend_recompute_ratios has 2 entries for 1 check layers"),
        (
            "blend_check_layers: [1, 2]\nblend_recompute_ratios: [0.1]",
            "blend_recompute_ratios has 1 entries for 2",
        ),
        ("blend_check_layers: [1, 2]\nblend_recompute_ratios: [0.1, 0.2]", "what one check layer drops cannot come"),
        ("local_device: cuda\nlocal_cpu: true", "local_device='cuda' and local_cpu=True contradict each other: keep"),
        ("local_device: cpu\nlocal_cpu: false", "local_device='cpu' and local_cpu=False contradict"),
        ("local_device: /a/\nlocal_disk: file:///b/", "local_disk='file:///b/' and local_device='/a/' contradict"),
        (
            "max_local_cpu_size: 1\nmax_local_cache_size: 2",
            "max_local_cpu_size=1 and max_local_cache_size=2",
        ),
        ("max_local_disk_size: 5", "max_local_disk_size=5 has no disk to count on: give local_disk too"),
        ("enable_blending: false", "enable_blending is given twice: keep one of them"),
    ],
)
def test_contradictions_are_errors(read: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(ON + text)
    assert "kv.yaml: " in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_size: 0", "chunk_size=0 must be a whole number, at least 1"),
        ("chunk_size: 2.5", "chunk_size=2.5 must be a whole number"),
        ("local_device: gpu", "local_device='gpu' is not known: use cpu, cuda or a folder"),
        ("local_device: true", "local_device=True must be a text"),
        ("local_device: s3://bucket/x", "local_device='s3://bucket/x' is not a folder of this machine"),
        ("local_cpu: yes please", "local_cpu='yes please' must be true or false"),
        ("local_disk: file://", "local_disk='file://' is not a folder"),
        ("max_local_cpu_size: 0", "max_local_cpu_size=0 leaves no memory to work in"),
        ("max_local_cpu_size: -1", "max_local_cpu_size=-1 must be a finite number, at least 0"),
        ("max_local_cpu_size: .inf", "max_local_cpu_size=inf must be a finite number, at least 0"),
        ("max_local_cpu_size: 5GB", "max_local_cpu_size='5GB' must be a number"),
        ("blend_recompute_ratio: 15", "blend_recompute_ratio=15 is a share of tokens: use a number from 0 to 1"),
        ("blend_recompute_ratios: []", "blend_recompute_ratios=[] must be a number or a list of numbers"),
        ("blend_recompute_ratios: 15%", "blend_recompute_ratios='15%' must be a number or a list of numbers"),
        ("blend_check_layers: 0", "blend_check_layers=[0] must be ascending layer numbers from 1 on"),
        ('blend_check_layers: "1, ["', "blend_check_layers='1, [' must be a number or a list of numbers"),
        ("blend_separator: # # ", "blend_separator has no value (a # begins a comment): put it in quotes"),
        ("blend_special_str:", "blend_special_str has no value"),
        ("blend_check_layers: last", "blend_check_layers='last' must be a number or a list of numbers"),
        ("blend_min_tokens: -5", "blend_min_tokens=-5 must be a whole number, at least 0"),
        ('blend_separator: ""', "blend_separator='' must be a text"),
        ("remote_url: 6379", "remote_url=6379 must be a text"),
        ("remote_serde: cachegen", "remote_serde='cachegen' is not known: use naive"),
        ("blend_add_special_in_precomp: true", "blend_add_special_in_precomp=True would put special tokens between"),
        ("use_layerwise: 1", "use_layerwise=1 must be true or false"),
    ],
)
def test_wrong_values_are_errors_that_name_file_key_and_fix(read: Any, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(ON + text)
    assert "kv.yaml: " in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"enable_blending: [true", "is not YAML: while parsing a flow sequence"),
        (b"a: b: c", "is not YAML: mapping values are not allowed here"),
        (b"\x80\x02}q\x00.", "is not YAML: 'utf-8' codec can't decode"),
        (b"PK\x03\x04", "is not YAML: unacceptable character"),
        (b"Blending is what I would like.", "holds no settings: write YAML, with a line such as"),
        (b"- enable_blending", "holds no settings"),
        (b"# nothing\n", "holds no settings"),
        (b"", "holds no settings"),
    ],
)
def test_a_file_that_is_not_yaml_is_an_error(read: Any, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read(content)
    assert str(error.value).startswith("LMCACHE_CONFIG_FILE='/")


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"LMCACHE_CONFIG_FILE='.*nowhere.yaml' cannot be read: No such file"):
        load_config({"LMCACHE_CONFIG_FILE": str(tmp_path / "nowhere.yaml")})
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        load_config({"LMCACHE_CONFIG_FILE": str(tmp_path)})


def test_unknown_keys_are_named_in_a_warning(read: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = read(ON + "save_decode_cache: false\nblend_recompute_rato: 0.2\n7: x")
    assert config.unknown == ("7", "blend_recompute_rato", "save_decode_cache")
    with caplog.at_level(logging.WARNING):
        config.warn()
    [record] = caplog.records
    assert record.getMessage().endswith("unknown and without effect: 7, blend_recompute_rato, save_decode_cache")
    assert "kv.yaml" in record.getMessage()


def test_variables_beside_a_file_are_named_in_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kv.yaml"
    path.write_text(ON)
    variables = {"LMCACHE_ENABLE_BLENDING": "false", "LMCACHE_LOG_LEVEL": "INFO", "LMCACHE_ELSE": "1"}
    config = load_config({"LMCACHE_CONFIG_FILE": str(path), **variables})
    assert config.enable_blending
    with caplog.at_level(logging.WARNING):
        config.warn()
    [record] = caplog.records
    assert record.getMessage().endswith("without effect, as the file takes precedence: LMCACHE_ENABLE_BLENDING")


def test_without_blending_the_rest_has_no_effect(read: Any, caplog: pytest.LogCaptureFixture) -> None:
    config = read(
        "enable_blending: false\nlocal_device: cpu\nlocal_disk: /kv\nremote_url: redis://h\nblend_min_tokens: 3"
    )
    assert config.engine_args == {"enable_blending": False} and config.idle == ("local_disk", "remote_url")
    with caplog.at_level(logging.WARNING):
        config.warn()
    assert "without effect while enable_blending is off" in caplog.text and "local_disk, remote_url" in caplog.text
    with pytest.raises(ValueError, match="blend_recompute_ratio=15 is a share"):
        read("enable_blending: false\nblend_recompute_ratio: 15")


def test_variables_are_read_where_there_is_no_file() -> None:
    assert load_config({}).engine_args == {"enable_blending": False}
    assert load_config({}).keys == {}
    config = load_config(
        {
            "LMCACHE_ENABLE_BLENDING": "True",
            "LMCACHE_BLEND_SPECIAL_STR": " # # ",
            "LMCACHE_BLEND_CHECK_LAYERS": "1",
            "LMCACHE_BLEND_RECOMPUTE_RATIOS": "0.15",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "5",
            "LMCACHE_USE_EXPERIMENTAL": "False",
            "LMCACHE_SOMETHING": "{",
            "PATH": "/bin",
        }
    )
    assert config.separator == " # # " and config.unknown == ("something",)
    assert config.engine_args["blend_check_layers"] == [1] and config.engine_args["blend_recompute_ratio"] == 0.15
    assert config.engine_args["blend_chunk_cache_gib"] == 5
    with pytest.raises(ValueError, match=r"the variables LMCACHE_\*: enable_blending='si' must be true or false"):
        load_config({"LMCACHE_ENABLE_BLENDING": "si"})
    with pytest.raises(ValueError, match=r"LMCACHE_CHUNK_SIZE='\[' is not a YAML value"):
        load_config({"LMCACHE_CHUNK_SIZE": "["})


def test_arguments_of_the_llm_may_not_contradict_the_file(read: Any) -> None:
    config = read(ON + "blend_recompute_ratios: 0.2\nblend_check_layers: 1")
    same = config.arguments({"blend_recompute_ratio": 0.2, "seed": 1})
    assert same["blend_recompute_ratio"] == 0.2 and same["seed"] == 1
    assert config.arguments({"blend_min_tokens": 7})["blend_min_tokens"] == 7, "a default gives way"
    assert config.arguments({"blend_selector": "random"})["blend_selector"] == "random"
    with pytest.raises(ValueError, match=r"has blend_recompute_ratios, which means blend_recompute_ratio=0\.2"):
        config.arguments({"blend_recompute_ratio": 0.3})


@pytest.mark.cpu_only
def test_chunks_on_a_gpu_need_one(read: Any) -> None:
    config = read(ON + "local_device: cuda")
    with pytest.raises(ValueError, match="local_device='cuda', but the engine runs on the cpu: use local_device: cpu"):
        config.arguments({"device": settings.current().device})


def test_errors_of_the_engine_name_the_key(read: Any) -> None:
    config = read(ON + "max_local_cpu_size: 5\nblend_min_tokens: 5\nblend_recompute_ratios: 0.5")
    message = config.translate_error("blend_recompute_ratio=0.5 and blend_recompute_ratios")
    assert message.endswith("kv.yaml: blend_recompute_ratios=0.5 and blend_recompute_ratios")
    message = config.translate_error("blend_chunk_cache_gib=5 is too much, blend_min_tokens=5 is not")
    assert message.endswith("kv.yaml: max_local_cpu_size=5 is too much, blend_min_tokens=5 is not")
    message = config.translate_error("blend_min_tokens is too much for this model")
    assert message.endswith("kv.yaml: blend_min_tokens is too much for this model")
    assert config.translate_error("the model is empty") == "the model is empty"
    with pytest.raises(ValueError, match="has blend_min_tokens") as error:
        config.arguments({"blend_min_tokens": 6})
    assert config.translate_error(str(error.value)) == str(error.value), "which names the file already"
