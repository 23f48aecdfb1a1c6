"""The decoder's contract with hooks and the engine, and the registry."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from tests import settings, tolerances
from tests.models.tiny import (
    ARCHITECTURES,
    DEVICE,
    DTYPE,
    FAMILIES,
    HEAD_DIM,
    PagedRunner,
    load_tiny,
    prompt,
    save,
    tiny_hf_model,
)
from vllm_blend import ops
from vllm_blend.attention.context import Kept, LayerHook, NewKV
from vllm_blend.attention.metadata import AttentionMetadata, LayerStep
from vllm_blend.models.causal_lm import attention_layers
from vllm_blend.models.decoder import DecoderSpec
from vllm_blend.models.llama import LlamaForCausalLM
from vllm_blend.models.loader import load_model
from vllm_blend.models.qwen2 import Qwen2ForCausalLM
from vllm_blend.models.registry import MODEL_REGISTRY, resolve_model_class
from vllm_blend.models.rotaries import rotaries_by_layer_type
from vllm_blend.ops.paged_kv import PagedKV

SPEC: dict[str, Any] = {
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "layer_types": ("full_attention", "full_attention"),
    "sliding_window": None,
}


class NarrowAt(LayerHook):
    """Keeps `rows` from one layer on."""

    def __init__(self, layer_idx: int, rows: torch.Tensor) -> None:
        self.layer_idx, self.rows = layer_idx, rows

    def on_kv(self, step: LayerStep, new: NewKV) -> Kept | None:
        return Kept(self.rows.to(DEVICE)) if step.layer_idx == self.layer_idx else None


class KeepKeys(LayerHook):
    """Records K before and after RoPE of every layer."""

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def on_kv(self, step: LayerStep, new: NewKV) -> None:
        assert step.layer_idx == len(self.seen)
        self.seen.append((new.k_unrotated.clone(), new.k.clone()))


@pytest.mark.parametrize("layer_idx", [0, 1, 2])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *FAMILIES])
def test_narrowed_rows_equal_the_same_rows_of_a_whole_step(architecture: str, layer_idx: int, tmp_path: Path) -> None:
    runner = PagedRunner(load_tiny(save(tiny_hf_model(architecture), tmp_path)), requests=2)
    steps = [(0, prompt(20)), (0, prompt(13, seed=2))]
    whole = runner.step(steps)  # leaves every layer's KV in the cache, where later layers of the narrowed step find it
    rows = torch.tensor([3, 4, 11, 19, 20, 27, 32])
    narrowed = runner.step(steps, [NarrowAt(layer_idx, rows)])
    assert narrowed.shape == (7, whole.shape[1])
    tolerances.check("logits", (narrowed - whole[rows]))


def test_a_step_may_be_narrowed_twice(tmp_path: Path) -> None:
    runner = PagedRunner(load_tiny(save(tiny_hf_model("qwen3"), tmp_path)))
    whole = runner.step([(0, prompt(20))])
    hooks = [NarrowAt(0, torch.tensor([2, 5, 9, 19])), NarrowAt(2, torch.tensor([1, 3]))]
    narrowed = runner.step([(0, prompt(20))], hooks)
    tolerances.check("logits", (narrowed - whole[[5, 19]]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hooks_see_keys_before_and_after_rope(architecture: str, tmp_path: Path) -> None:
    model = load_tiny(save(tiny_hf_model(architecture), tmp_path))
    hook = KeepKeys()
    ids = prompt(20)
    PagedRunner(model).step([(0, ids)], [hook])
    assert len(hook.seen) == 3
    rotary = model.model.layers[0].self_attn.attn.rotary
    for before, after in hook.seen:
        torch.testing.assert_close(rotary(torch.arange(20, device=DEVICE), before, before)[1], after)
        assert not torch.allclose(before[1:], after[1:])


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *FAMILIES])
def test_keys_before_rope_alone_leave_a_layer_its_one_pass(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the same, and so is what the step gives, with a hook that wants both and without."""

    class KeepUnrotated(LayerHook):
        def __init__(self) -> None:
            self.seen: list[torch.Tensor] = []

        def on_unrotated_kv(
            self, layer_idx: int, kv: PagedKV, metadata: AttentionMetadata, k: torch.Tensor, v: torch.Tensor
        ) -> None:
            assert layer_idx == len(self.seen) and len(metadata.positions) == len(v) == 20
            self.seen.append(k.clone())

    model = load_tiny(save(tiny_hf_model(architecture), tmp_path))
    both, beside, alone = KeepKeys(), KeepUnrotated(), KeepUnrotated()
    apart = PagedRunner(model).step([(0, prompt(20))], [both, beside])
    monkeypatch.delattr(ops, "rotary_qk")  # what rotates apart from the write
    together = PagedRunner(model).step([(0, prompt(20))], [alone])
    tolerances.check("logits", together - apart)
    assert len(both.seen) == 3
    for (expected, _), first, second in zip(both.seen, beside.seen, alone.seen, strict=True):
        assert torch.equal(first, expected)
        if settings.current().exact:
            torch.testing.assert_close(second, expected)
        else:  # one rounding of K in place of two changes what later layers get
            tolerances.check_kv(second, expected)


def test_public_names_of_the_decoder_stack(tmp_path: Path) -> None:
    stack = load_tiny(save(tiny_hf_model("llama"), tmp_path)).model
    assert stack.cache_fuse_metadata == {}
    assert stack.old_kvs == []
    assert [layer.self_attn.hack_kv for layer in stack.layers] == [None] * 3
    stack.cache_fuse_metadata["check"] = True
    stack.old_kvs = [[torch.zeros(1), torch.zeros(1)]]
    stack.layers[0].self_attn.hack_kv = [torch.zeros(1), torch.zeros(1)]
    other = load_tiny(str(tmp_path)).model
    assert other.cache_fuse_metadata == {}, "each model has a dict of its own"
    assert stack.state_dict().keys() == other.state_dict().keys(), "hooks are no parameters"


def test_forward_needs_a_context(tmp_path: Path) -> None:
    model = load_tiny(save(tiny_hf_model("llama"), tmp_path))
    with pytest.raises(RuntimeError, match="forward_context"):
        model(prompt(3).to(DEVICE))


def test_a_failed_step_leaves_no_positions_behind(tmp_path: Path) -> None:
    model = load_tiny(save(tiny_hf_model("llama"), tmp_path))
    expected = PagedRunner(model).run(prompt(8), [8])

    class Failing(LayerHook):
        def on_kv(self, step: LayerStep, new: NewKV) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        PagedRunner(model).step([(0, prompt(8))], [Failing()])
    assert model.model.layers[0].self_attn.attn.rotary._shared is None
    assert torch.equal(PagedRunner(model).run(prompt(8), [8]), expected)


def test_layers_of_one_kind_share_their_rope_tables(tmp_path: Path) -> None:
    model = load_tiny(save(tiny_hf_model("mistral", sliding_window=8), tmp_path))
    assert len({id(layer.self_attn.attn.rotary) for layer in model.model.layers}) == 1


@pytest.mark.parametrize("family", ["mistral", "phi3", "mixtral"])
def test_a_window_as_long_as_the_longest_sequence_is_none(family: str, tmp_path: Path) -> None:
    """Phi-4-mini's is twice its context: features that refuse windows take it."""
    directory = save(tiny_hf_model(family, sliding_window=24), tmp_path)
    for max_position, window in ((25, 24), (24, None), (16, None)):
        model = load_tiny(directory, max_position)
        assert [layer.self_attn.attn.sliding_window for layer in model.model.layers] == [window] * 3


def test_layers_without_rope_turn_nothing(tmp_path: Path) -> None:
    model = load_tiny(save(tiny_hf_model("smollm3", no_rope_layers=[0, 1, 0]), tmp_path))
    rotaries = [layer.self_attn.attn.rotary for layer in model.model.layers]
    assert rotaries[0] is rotaries[2] is not rotaries[1]
    keys = torch.randn(5, 2, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    positions = torch.arange(3, 8, device=DEVICE)
    assert torch.equal(rotaries[0](positions, keys, keys)[1], keys)
    assert not torch.equal(rotaries[1](positions, keys, keys)[1], keys)
    # Chunks of a model that differs in this alone are other chunks.
    assert rotaries[0].fingerprint() != rotaries[1].fingerprint()


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "granite", "mixtral", "olmo2", "qwen3_moe"])
def test_families_that_cannot_be_quantized_say_so(family: str) -> None:
    config, model_class = tiny_hf_model(family).config, FAMILIES[family][1]
    config.architectures = [model_class.__name__]
    with pytest.raises(ValueError, match=f"quantization='fp8' is not supported for {model_class.__name__}"):
        resolve_model_class(config)(config, 16, "fp8")


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "gemma3",
            {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping=50.0 in the model",
        ),
        ("gemma3", {"hidden_activation": "relu"}, "hidden_activation 'relu' is not supported"),
        ("mixtral", {"num_experts_per_tok": 9}, "sends a token to 9 of 4 experts"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "says of 2 layers whether they have RoPE, but it has 3 layers"),
    ],
)
def test_traits_that_make_no_sense(family: str, changes: dict[str, Any], message: str) -> None:
    config, model_class = tiny_hf_model(family).config, FAMILIES[family][1]
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message):
        MODEL_REGISTRY[model_class.__name__](config, 16)


def test_rope_by_layer_type() -> None:
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = SimpleNamespace(head_dim=16, max_position_embeddings=64, rope_parameters=nested)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    built = rotaries_by_layer_type(config, 32, kinds)
    assert built["full_attention"].spec.theta == 1e6
    assert built["sliding_attention"].spec.theta == 1e4
    config.rope_parameters = nested["sliding_attention"]
    shared = rotaries_by_layer_type(config, 32, kinds)
    assert shared["full_attention"] is shared["sliding_attention"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "must be a multiple of num_key_value_heads"),
        ({"num_layers": 0, "layer_types": ()}, "num_hidden_layers = 0: it must be positive"),
        ({"layer_types": ("full_attention",)}, "layer_types has 1 entries for 2 layers"),
        ({"layer_types": ("full_attention", "chunked")}, r"unknown layer_types \['chunked'\]"),
        ({"layer_types": ("full_attention", "sliding_attention")}, "no sliding_window"),
    ],
)
def test_shapes_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    DecoderSpec(**SPEC)
    with pytest.raises(ValueError, match=message):
        DecoderSpec(**(SPEC | changes))


def test_qwen_configs_older_than_layer_types() -> None:
    config = SimpleNamespace(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=3,
        num_attention_heads=2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
    )
    spec = Qwen2ForCausalLM.spec(config)
    assert [spec.window(layer) for layer in range(3)] == [None, None, 5]
    config.use_sliding_window = False
    assert [Qwen2ForCausalLM.spec(config).window(layer) for layer in range(3)] == [None] * 3


def test_registry_takes_the_first_known_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model_class(SimpleNamespace(architectures=["Odd", "LlamaForCausalLM"])) is LlamaForCausalLM

    class MyForCausalLM(LlamaForCausalLM):
        pass

    monkeypatch.setitem(MODEL_REGISTRY, "MyForCausalLM", MyForCausalLM)
    assert resolve_model_class(SimpleNamespace(architectures=["MyForCausalLM"])) is MyForCausalLM


def test_a_registered_class_must_be_a_causal_lm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=1, hidden_size=16, intermediate_size=16, num_attention_heads=1)
    config.architectures = ["HeadlessLM"]

    class HeadlessLM(torch.nn.Module):
        def __init__(self, config: LlamaConfig, max_position: int, quantization: str | None) -> None:
            super().__init__()
            self.config, self.model = config, torch.nn.Module()

    monkeypatch.setitem(MODEL_REGISTRY, "HeadlessLM", HeadlessLM)
    with pytest.raises(TypeError, match="HeadlessLM has no compute_logits"):
        load_model(config, "", torch.float32, "cpu", "dummy", max_position=16)


def test_the_attention_of_every_layer_must_be_ours() -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=16, intermediate_size=16, num_attention_heads=1)
    model = LlamaForCausalLM(config, 16)
    assert [attention.layer_idx for attention in attention_layers(model)] == [0, 1]
    model.set_submodule("model.layers.1.self_attn.attn", torch.nn.Identity())
    with pytest.raises(TypeError, match=r"LlamaForCausalLM attend by.*Attention.*Identity"):
        attention_layers(model)


@pytest.mark.parametrize("architectures", [["BertModel"], [], None])
def test_registry_lists_what_it_knows(architectures: list[str] | None) -> None:
    known = "Gemma3ForCausalLM, Gemma3ForConditionalGeneration, GptOssForCausalLM, "
    with pytest.raises(ValueError, match=f"unsupported model architecture: .*known: {known}"):
        resolve_model_class(SimpleNamespace(architectures=architectures))
