"""GGUF files that are damaged, lie, or are of other models are refused by name, with what to do."""

from __future__ import annotations

import struct
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.engine.tiny_tokenizers import byte_level
from tests.models.gguf_files import Q8_0, gguf_model, write_gguf
from tests.models.gguf_vocabularies import byte_level_entries, entries_of, sentencepiece_entries, write_vocabulary
from tests.models.tiny import load_tiny
from vllm_blend.models.gguf.config import gguf_config
from vllm_blend.models.gguf.header import read_header
from vllm_blend.models.gguf.tensors import gguf_tensors
from vllm_blend.models.gguf.tokenizer import load_gguf_tokenizer
from vllm_blend.models.loader import load_hf_config
from vllm_blend.models.registry import MODEL_REGISTRY

pytestmark = pytest.mark.cpu_only
REMEDY = "fetch the file again, or give the directory of the same model in safetensors"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(write_gguf(tmp_path / "model.gguf", "qwen2", gguf_model("qwen2", num_hidden_layers=2), Q8_0))


def whole_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        model, entries = gguf_model("qwen2", num_hidden_layers=1), entries_of(byte_level(), "qwen2")
        return Path(write_gguf(Path(folder) / "model.gguf", "qwen2", model, Q8_0, vocabulary=entries)).read_bytes()


WHOLE = whole_file()
HEADER = WHOLE.rindex(b"blk.0") + 200  # bytes of it, and some more


@pytest.mark.parametrize("size", [0, 3, 4, 20, 24, 30, 200, 1500, 5000, -40])
def test_a_truncated_file_is_named(size: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.gguf is damaged or not a GGUF file \(.*\): fetch it again"):
        load_hf_config(str(path))


def test_what_is_no_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("this is no model")
    with pytest.raises(ValueError, match=r"text\.gguf is damaged or not a GGUF file \(it does not begin with GGUF\)"):
        load_hf_config(str(tmp_path / "text.gguf"))
    with pytest.raises(FileNotFoundError, match=r"GGUF file '.*none\.gguf' does not exist"):
        load_hf_config(str(tmp_path / "none.gguf"))
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(FileNotFoundError, match=r"is a file: give the directory .*, or a \*\.gguf file"):
        load_hf_config(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    ("at", "form", "value", "message"),
    [
        (4, "<I", 1, "its version is 1"),
        (4, "<I", 3 << 24, "its version is 50331648, .* of little-endian machines"),
        (8, "<Q", 1 << 60, "ends at byte|dimensions"),
        (16, "<Q", 1 << 60, "ends at byte|there twice|no type|dimensions|unpack"),
        (24, "<Q", 1 << 62, "it ends at byte"),
    ],
)
def test_counts_that_lie_take_no_memory(at: int, form: str, value: int, message: str, path: Path) -> None:
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, at, value)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"model\.gguf is damaged or not a GGUF file \(.*({message})"):
        load_hf_config(str(path))


@given(st.lists(st.tuples(st.integers(0, HEADER), st.integers(0, 255)), min_size=1, max_size=4))
@example([(24, 255)])
@settings(deadline=None, max_examples=200)
def test_any_damage_of_the_header_is_an_error_or_none(changes: list[tuple[int, int]]) -> None:
    """A file is refused with a ValueError that names it, or its header is one that a file may have."""
    content = bytearray(WHOLE)
    for at, value in changes:
        content[at] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        path.write_bytes(content)
        try:
            load_gguf_tokenizer(path)
        except ValueError as error:
            assert "model.gguf" in str(error)
        try:
            header = read_header(path)
            config = gguf_config(header)
        except ValueError as error:
            assert "model.gguf" in str(error)
            return
        assert config.architectures[0] in MODEL_REGISTRY
        for tensor in gguf_tensors(header).values():
            assert tuple(tensor.read().shape) == tensor.shape


def without(name: str) -> Any:
    return lambda arrays: arrays.pop(name)


def shaped(name: str, *shape: int) -> Any:
    return lambda arrays: arrays.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("blk.1.attn_q.weight"), r"missing: model\.layers\.1\.self_attn\.q_proj\.weight"),
        (without("output_norm.weight"), r"missing: model\.norm\.weight"),
        (shaped("blk.0.ffn_up.weight", 96, 32), r"mlp\.up_proj\.weight has shape \(96, 32\), the config asks for"),
        (shaped("blk.0.attn_q.weight", 62, 64), r"q_proj\.weight has shape \(62, 64\)"),
        (shaped("output_norm.weight", 63), r"model\.norm\.weight has shape \(63,\)"),
        (shaped("blk.0.ffn_gate_exps.weight", 4, 96, 64), r"unexpected: blk\.0\.ffn_gate_exps\.weight"),
        (shaped("v.patch_embd.weight", 4, 64), r"unexpected: v\.patch_embd\.weight"),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tensors_that_do_not_fit_are_named(family: str, change: Any, message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", family, gguf_model(family, num_hidden_layers=2), change=change)
    with pytest.raises(ValueError, match=rf"model\.gguf: the checkpoint does not fit .*{message}.*{REMEDY}"):
        load_tiny(path)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_tensor_under_two_names_is_named(is_first: bool, tmp_path: Path) -> None:
    """One is llama.cpp's, the other is what it stands for here: one of them would be used in silence."""

    def twice(arrays: dict[str, np.ndarray]) -> None:
        others = {} if is_first else dict(arrays)
        if not is_first:
            arrays.clear()
        arrays["model.embed_tokens.weight"] = np.zeros_like((others or arrays)["token_embd.weight"])
        arrays.update(others)

    file = write_gguf(tmp_path / "model.gguf", "qwen2", gguf_model("qwen2", num_hidden_layers=2), change=twice)
    with pytest.raises(ValueError, match=r"model\.gguf has model\.embed_tokens\.weight twice, once as"):
        load_tiny(file)


def test_what_is_left_out_of_the_metadata_takes_no_memory(tmp_path: Path) -> None:
    """An array is not copied: of bytes, or of one long string."""
    size = 20 << 20
    for name, array in (("numbers", struct.pack("<IQ", 0, size)), ("text", struct.pack("<IQQ", 8, 1, size))):
        key = b"k" * 3
        metadata = struct.pack("<Q", len(key)) + key + struct.pack("<I", 9) + array + bytes(size)
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + metadata)
        read_header(file)  # what is imported at first
        tracemalloc.start()
        assert read_header(file).metadata == {"kkk": None}
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < size // 20


def test_layers_that_are_missing_are_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen2", gguf_model("qwen2"), metadata={"block_count": 90})
    with pytest.raises(ValueError, match=r"model\.gguf: qwen2\.block_count is 90, but the file has tensors of 3 "):
        load_hf_config(path)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_a_count_of_layers_that_lies_takes_no_memory(family: str, tmp_path: Path) -> None:
    """Neither with the tensors of a model nor with a tensor of the last layer that it lies about."""
    lie = 2**32 - 1
    model = gguf_model(family)
    for change, layers in ((lambda arrays: None, 0), (shaped(f"blk.{lie - 1}.attn_norm.weight", 64), 1)):
        path = write_gguf(tmp_path / "model.gguf", family, model, change=change, metadata={"block_count": lie})
        found = model.config.num_hidden_layers + layers
        with pytest.raises(ValueError, match=rf"{family}\.block_count is {lie}, but the file has tensors of {found} "):
            load_hf_config(path)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "qwen2", gguf_model("qwen2"), architecture="qwen2moe")
    with pytest.raises(
        ValueError,
        match=r"model\.gguf: general\.architecture is 'qwen2moe' \(did you mean 'qwen3moe'\?\); of GGUF files gemma3, "
        r"gpt-oss, granite, llama, mistral3, olmo2, phi3, qwen2, qwen3, qwen3moe, smollm3 are read\. "
        r".*from_pretrained\('.*', gguf_file='model\.gguf', .*dequantize=True\)\)\.save_pretrained",
    ):
        load_hf_config(path)


@pytest.mark.parametrize(
    ("family", "metadata", "message"),
    [
        ("llama", {"expert_count": 8}, r"llama\.expert_used_count is missing, where a positive whole number"),
        ("qwen2", {"expert_count": 8}, r"qwen2\.expert_count is 8, which is not supported here"),
        ("qwen3moe", {"expert_gating_func": 2}, r"qwen3moe\.expert_gating_func is 2, which is not supported"),
        ("qwen3moe", {"expert_shared_count": 1}, r"qwen3moe\.expert_shared_count is 1, which is not supported"),
        ("gpt-oss", {"attention.sliding_window_pattern": 4}, r"gpt-oss\.attention\.sliding_window_pattern is 4"),
        ("granite", {"rope.scaling.finetuned": False}, r"granite\.rope\.scaling\.finetuned is False"),
        ("granite", {"logit_scale": None}, r"granite\.logit_scale is missing, where a positive number is needed"),
        ("olmo2", {"attention.sliding_window": 64}, r"olmo2\.attention\.sliding_window is 64"),
        ("mistral3", {"rope.scaling.type": None, "rope.scaling.factor": None}, r"temperature_scale needs .* yarn"),
        ("mistral3", {"attention.temperature_length": 9}, r"mistral3\.attention\.temperature_length is 9"),
        ("llama", {"attention.sliding_window": 64}, r"llama\.attention\.sliding_window is 64, which is not supported"),
        ("llama", {"rope.dimension_count": 8}, r"llama\.rope\.dimension_count is 8, which is not supported"),
        ("llama", {"attention.value_length": 8}, r"llama\.attention\.value_length is 8"),
        ("qwen2", {"block_count": None}, r"qwen2\.block_count is missing, where a positive whole number is needed"),
        ("qwen2", {"embedding_length": 0}, r"qwen2\.embedding_length is 0, where a positive whole number"),
        ("qwen2", {"attention.head_count": [4, 2]}, r"qwen2\.attention\.head_count is \[4, 2\]"),
        ("qwen2", {"attention.layer_norm_rms_epsilon": float("nan")}, r"rms_epsilon is nan, where a positive number"),
        ("qwen2", {"rope.scaling.type": "longrope"}, r"rope\.scaling\.type is 'longrope': 'linear', 'yarn' and"),
        ("qwen2", {"rope.scaling.type": "linear"}, r"qwen2\.rope\.scaling\.factor is missing"),
        ("llama", {"attention.causal": False}, r"llama\.attention\.causal is False, which is not supported here"),
        ("llama", {"attention.scale": 0.5}, r"llama\.attention\.scale is 0\.5, which is not supported here"),
        ("gemma3", {"attention.scale": 0.5}, r"gemma3\.attention\.scale is 0\.5, which is not supported here"),
        ("qwen2", {"rope.scaling.attn_factor": 1.5}, r"qwen2\.rope\.scaling\.attn_factor is 1\.5, which is not"),
        ("qwen2", {"rope.scaling.factor": -2.0}, r"qwen2\.rope\.scaling\.factor is -2\.0, where a positive number"),
        ("qwen2", {"rope.scale_linear": "much"}, r"qwen2\.rope\.scale_linear is 'much', where a positive number"),
        (
            "gemma3",
            {"attn_logit_softcapping": 50.0},
            r"gemma3\.attn_logit_softcapping is 50\.0, which is not",
        ),
        ("gemma3", {"final_logit_softcapping": -1.0}, r"final_logit_softcapping is -1\.0, where a positive number"),
        (
            "gemma3",
            {"attention.sliding_window_pattern": [1, 0]},
            r"sliding_window_pattern is \[1, 0\], where a ",
        ),
        ("gemma3", {"rope.freq_base_swa": 0.0}, r"gemma3\.rope\.freq_base_swa is 0\.0, where a positive number"),
        ("gemma3", {"attention.sliding_window": None}, r"gemma3\.attention\.sliding_window is missing"),
        ("qwen2", {"/split.count": 3}, r" is one of 3 parts of a file, so its name must end with -00001-of-00003"),
    ],
)
def test_metadata_that_cannot_be_read_are_named(
    family: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", family, gguf_model(family), metadata=metadata)
    with pytest.raises(ValueError, match=rf"model\.gguf.*{message}"):
        load_hf_config(path)


def test_the_missing_package_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"GGUF files need the package gguf .*pip install 'vllm-blend\[gguf\]'"):
        load_hf_config(str(path))


BYTES, PIECES = byte_level_entries("qwen2"), sentencepiece_entries()


@pytest.mark.parametrize(
    ("entries", "change", "message"),
    [
        (BYTES, {"model": "bert"}, r"tokenizer\.ggml\.model='bert': gpt2 \(byte-level BPE\) and llama"),
        (BYTES, {"pre": "qwen3"}, r"tokenizer\.ggml\.pre='qwen3' is unknown: .*did you mean 'qwen2'"),
        (BYTES, {"pre": 7}, r"tokenizer\.ggml\.pre=7 is unknown"),
        (BYTES, {"tokens": None}, "tokens must be an array of strings"),
        (BYTES, {"tokens": list(range(9))}, "tokens must be an array of strings"),
        (BYTES, {"tokens": ["a", "a"], "token_type": [1, 1]}, "tokens has a token twice"),
        (BYTES, {"token_type": [1, 2]}, "token_type one of as many numbers"),
        (BYTES, {"merges": None}, "merges must be an array of pairs of tokens"),
        (BYTES, {"merges": ["ab"]}, "merges must be an array of pairs of tokens"),
        (BYTES, {"merges": ["no token"]}, "Token `no` out of vocabulary"),
        (PIECES, {"scores": [1.0]}, r"scores must be an array of a number for each token"),
        (PIECES, {"scores": ["high"] * len(PIECES["/tokenizer.ggml.tokens"])}, ""),
        (PIECES, {"bos_token_id": [1]}, "unhashable"),
    ],
)
def test_a_vocabulary_that_cannot_be_read_is_named(
    entries: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    changed = entries | {f"/tokenizer.ggml.{name}": value for name, value in change.items()}
    path = write_vocabulary(tmp_path / "model.gguf", changed)
    with pytest.raises(ValueError, match=rf"the tokenizer of .*model\.gguf cannot be read: .*{message}") as raised:
        load_gguf_tokenizer(path)
    assert "give tokenizer=, the directory or Hub id of the model that" in str(raised.value)
