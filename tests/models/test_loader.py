"""Loading: what is filled, and how damaged or foreign checkpoints are reported."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.models.loading import needs_peak, peak_of_loading
from tests.models.tiny import CONTEXT, DTYPE, edit_config, load_tiny, save, tiny_hf_model
from vllm_blend.models import stored
from vllm_blend.models.llama import LlamaForCausalLM
from vllm_blend.models.loader import construct_as, load_hf_config, load_model
from vllm_blend.models.weights import checkpoint_destinations


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(tiny_hf_model("llama", num_hidden_layers=2), tmp_path)
    return tmp_path


def rewrite(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Apply `change` to the checkpoint's tensors in place."""
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})


def shard(checkpoint: Path) -> list[Path]:
    """Save the checkpoint again in several files with an index."""
    save(tiny_hf_model("llama", num_hidden_layers=2), checkpoint, max_shard_size="30KB")
    (checkpoint / "model.safetensors").unlink(missing_ok=True)
    return sorted(checkpoint.glob("*.safetensors"))


def test_every_parameter_equals_the_checkpoint(checkpoint: Path) -> None:
    saved = {name: t.to(DTYPE) for name, t in load_file(checkpoint / "model.safetensors").items()}
    model = load_tiny(str(checkpoint))
    destinations = {}
    for name, destination in checkpoint_destinations(model).items():
        assert isinstance(destination, torch.Tensor)
        destinations[name] = destination
    assert destinations.keys() == saved.keys()
    assert all(torch.equal(destinations[name].cpu(), saved[name]) for name in saved)
    assert sum(t.numel() for t in destinations.values()) == sum(p.numel() for p in model.parameters())
    packed = model.model.layers[1].self_attn.qkv_proj.weight
    parts = [saved[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(packed.cpu(), torch.cat(parts))


def test_a_file_that_is_mapped_in_turns_gives_the_same_numbers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = dict(load_tiny(str(checkpoint)).named_parameters())
    opened: list[Path] = []

    def count(path: Path, **options: Any) -> Any:
        opened.append(path)
        return safe_open(path, **options)

    monkeypatch.setattr(stored, "safe_open", count)
    monkeypatch.setattr(stored, "READ_AT_ONCE", 10_000)
    model = load_tiny(str(checkpoint))
    assert len(opened) > 10
    assert all(torch.equal(parameter, expected[name]) for name, parameter in model.named_parameters())


@needs_peak
def test_what_has_been_copied_from_a_file_does_not_stay_in_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6}
    save(tiny_hf_model("llama", **sizes), tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert size > 32 << 20
    assert size < peak_of_loading(tmp_path, 4 << 20) < 1.3 * size + (8 << 20)  # at once it would be 2.2 times


def test_the_model_is_ready_for_inference(checkpoint: Path) -> None:
    model = load_tiny(str(checkpoint), dtype=torch.bfloat16)
    assert not model.training
    assert all(not parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}, "RoPE tables"
    assert torch.get_default_dtype() == torch.float32


def test_parameters_are_allocated_on_the_device_in_the_dtype() -> None:
    # Nothing is allocated on "meta": 7B parameters build at once, unless something goes through the host first.
    config = tiny_hf_model("llama").config
    config.update({"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128})
    config.update({"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000})
    with construct_as(torch.bfloat16, torch.device("meta")):
        model = LlamaForCausalLM(config, max_position=16)
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) > 7e9


def test_tied_head_shares_memory_and_its_copy_in_the_checkpoint_is_ignored(tmp_path: Path) -> None:
    save(tiny_hf_model("llama", tie_word_embeddings=True), tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros_like(embedding)}))
    model = load_tiny(str(tmp_path))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight.cpu(), embedding.to(DTYPE))


def test_stored_inverse_frequencies_are_ignored(checkpoint: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(checkpoint, lambda tensors: tensors.update({name: torch.zeros(8)}))
    assert load_tiny(str(checkpoint)).model.layers[0].self_attn.attn.rotary.cos.std() > 0


def test_dummy_weights_are_small_random_and_repeatable(checkpoint: Path) -> None:
    config = load_hf_config(str(checkpoint))
    first, second = (
        load_model(config, "no such directory", torch.float32, "cpu", "dummy", max_position=CONTEXT) for _ in range(2)
    )
    weights = list(second.get_submodule("").parameters())
    for (name, one), two in zip(first.get_submodule("").named_parameters(), weights, strict=True):
        assert torch.equal(one, two)
        assert one.eq(1).all() if "norm" in name else 0.01 < one.std() < 0.03


# Damaged weights


def test_truncated_file_is_named(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_tiny(str(checkpoint))


@pytest.mark.parametrize("content", [b"", b"not a safetensors file at all", b"\xff" * 64])
def test_file_of_something_else_is_named(checkpoint: Path, content: bytes) -> None:
    (checkpoint / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_tiny(str(checkpoint))


def test_missing_unexpected_and_misshapen_tensors_are_named_together(checkpoint: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.0.self_attn.k_proj.weight"]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
        tensors["model.norm.weight"] = torch.zeros(63)

    rewrite(checkpoint, change)
    with pytest.raises(ValueError, match="does not fit LlamaForCausalLM") as raised:
        load_tiny(str(checkpoint))
    message = str(raised.value)
    assert "missing: model.layers.0.self_attn.k_proj.weight" in message
    assert "unexpected: model.layers.7.mlp.up_proj.weight" in message
    assert "model.norm.weight has shape (63,), the config asks for (64,)" in message
    assert message.count("model.norm.weight") == 1


def test_long_lists_of_names_are_cut(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: [tensors.pop(name) for name in list(tensors)[:-1]])
    with pytest.raises(ValueError, match=r"missing: .* and \d+ more"):
        load_tiny(str(checkpoint))


def test_integer_tensors_are_refused(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored as torch\.int8: it is quantized"):
        load_tiny(str(checkpoint))


def test_missing_shard_is_named(checkpoint: Path) -> None:
    lost = shard(checkpoint)[1]
    lost.unlink()
    with pytest.raises(FileNotFoundError, match=lost.name):
        load_tiny(str(checkpoint))


def test_shards_without_an_index_load(checkpoint: Path) -> None:
    shard(checkpoint)
    (checkpoint / "model.safetensors.index.json").unlink()
    load_tiny(str(checkpoint))


def test_a_tensor_in_two_files_is_an_error(checkpoint: Path) -> None:
    shards = shard(checkpoint)
    (checkpoint / "model.safetensors.index.json").unlink()
    (checkpoint / "zz-copy.safetensors").write_bytes(shards[0].read_bytes())
    with pytest.raises(ValueError, match=r"and again in zz-copy\.safetensors"):
        load_tiny(str(checkpoint))


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index(checkpoint: Path, content: str) -> None:
    shard(checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is not an index of weights"):
        load_tiny(str(checkpoint))


def test_no_weights(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no weights"):
        load_tiny(str(checkpoint))


# Configs


def test_missing_directory() -> None:
    with pytest.raises(FileNotFoundError, match="'/no/such/model' does not exist"):
        load_hf_config("/no/such/model")
    with pytest.raises(FileNotFoundError, match=r"'\./nowhere' does not exist"):
        load_hf_config("./nowhere")


def test_a_file_is_not_a_model(checkpoint: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is a file: give the directory"):
        load_hf_config(str(checkpoint / "config.json"))


def test_missing_config_json(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json: give the directory of a Hugging Face model"):
        load_hf_config(str(tmp_path))
    (tmp_path / "model-Q4_0.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json: give the path of a GGUF file, '.*Q4_0\.gguf'"):
        load_hf_config(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"model_type": "llama",', "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b"[1, 2]", "must hold a JSON object, got list"),
        (b'{"model_type": "nonesuch"}', "LlamaForCausalLM"),
        (b"{}", "LlamaForCausalLM"),
        (b'{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
    ],
)
def test_damaged_config_json(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_hf_config(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'; known: Gemma3ForCausalLM, Gemma3"),
        ({"rope_parameters": {"rope_type": "nonesuch", "rope_theta": 1e4}}, "unknown RoPE type 'nonesuch'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "hqq", "bits": 4}}, "is quantized in a way that cannot be read"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: the first must be a multiple of the second"),
    ],
)
def test_configs_that_cannot_be_served(checkpoint: Path, changes: dict[str, Any], message: str) -> None:
    edit_config(checkpoint, **changes)
    with pytest.raises(ValueError, match=message):
        load_tiny(str(checkpoint))
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize(
    ("options", "message"),
    [({"load_format": "pt"}, "load_format must be one of auto, dummy"), ({"dtype": torch.int32}, "floating-point")],
)
def test_senseless_options(checkpoint: Path, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "max_position": CONTEXT} | options
    with pytest.raises(ValueError, match=message):
        load_model(load_hf_config(str(checkpoint)), str(checkpoint), **arguments)


# The Hub


def test_hub_id_is_downloaded_at_its_revision(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def snapshot_download(repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert "*.safetensors" in allow_patterns
        asked.append((repo_id, revision))
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    config = load_hf_config(str(checkpoint))
    model = load_model(config, "someone/tiny", torch.float32, "cpu", max_position=CONTEXT, revision="abc")
    assert asked == [("someone/tiny", "abc")]
    assert math.isfinite(model.get_submodule("model.norm").get_parameter("weight").sum().item())


def test_hub_failures_name_the_model(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    config = load_hf_config(str(checkpoint))
    with pytest.raises(FileNotFoundError, match="could not fetch the weights of 'someone/tiny' from the Hub: offline"):
        load_model(config, "someone/tiny", torch.float32, "cpu", max_position=CONTEXT)


def test_config_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(*_: Any, **__: Any) -> Any:
        raise OSError("someone/tiny is not a valid model identifier")

    monkeypatch.setattr("vllm_blend.models.loader.AutoConfig.from_pretrained", from_pretrained)
    with pytest.raises(FileNotFoundError, match=r"no config for 'someone/tiny'.*identifier\)$"):
        load_hf_config("someone/tiny")
    with pytest.raises(FileNotFoundError, match="of a repository of GGUF files give one, as in someone/t-GGUF:Q4_K_M"):
        load_hf_config("someone/t-GGUF")


def test_a_mistyped_path_fails_before_the_hub_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name whose folder exists may be a model of the Hub all the same: it is loaded where the Hub answers."""
    loaded: list[str] = []

    def unreachable(*_: Any, **__: Any) -> Any:
        raise OSError("name or service not known")

    def from_pretrained(model: str, **_: Any) -> Any:
        loaded.append(model)
        return SimpleNamespace()

    monkeypatch.setattr("vllm_blend.models.loader.AutoConfig.from_pretrained", from_pretrained)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inputs" / "demo-model").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match=r"'inputs/demo-modle' does not exist.*mean 'inputs/demo-model'\?"):
        load_hf_config("inputs/demo-modle")
    assert not loaded
    for name in ("elsewhere/demo-model", "gpt2"):  # no folder speaks for a path
        load_hf_config(name)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    load_hf_config("inputs/demo-modle")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: "/cache/config.json")
    load_hf_config("inputs/demo-modle")
    assert loaded == ["elsewhere/demo-model", "gpt2", "inputs/demo-modle", "inputs/demo-modle"]


def test_shard_index_lists_its_files_once(checkpoint: Path) -> None:
    files = shard(checkpoint)
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    assert len(index["weight_map"]) > len(files)
    load_tiny(str(checkpoint))
