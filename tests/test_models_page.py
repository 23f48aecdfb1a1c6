"""docs/models.md: it is current, and what the classes say of themselves is true of models that are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.tiny import ARCHITECTURES, FAMILIES, tiny_hf_model
from vllm_blend.models.causal_lm import attention_layers
from vllm_blend.models.decoder import DecoderForCausalLM
from vllm_blend.models.gguf.families import GGUF_FAMILIES
from vllm_blend.models.loader import load_model
from vllm_blend.models.registry import MODEL_REGISTRY
from vllm_blend.models.weight_formats import WEIGHT_FORMATS
from vllm_blend.models_page import models_page

ROOT = Path(__file__).parent.parent
NAMES = {name: kinds[1].__name__ for name, kinds in (ARCHITECTURES | FAMILIES).items()}
WINDOWED: dict[str, Any] = {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 0}


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/models.md").read_text(encoding="utf-8") == models_page(), (
        "run python -m vllm_blend.models_page > docs/models.md"
    )


def test_everything_that_is_registered_is_there() -> None:
    page = models_page()
    assert all(f"| `{name}` | " in page for name in [*MODEL_REGISTRY, *WEIGHT_FORMATS, *GGUF_FAMILIES])
    assert {family.architecture for family in GGUF_FAMILIES.values()} <= set(MODEL_REGISTRY)
    for model in MODEL_REGISTRY.values():
        assert issubclass(model, DecoderForCausalLM)
        assert model.serves


@pytest.mark.parametrize("family", NAMES)
def test_windows_and_sinks_are_as_the_page_says(family: str) -> None:
    model_class = MODEL_REGISTRY[NAMES[family]]
    assert issubclass(model_class, DecoderForCausalLM)
    config = tiny_hf_model(family, **WINDOWED).config
    config.architectures = [NAMES[family]]
    attentions = attention_layers(load_model(config, "", torch.float32, "cpu", "dummy", max_position=96))
    assert any(attention.sliding_window for attention in attentions) is bool(model_class.windows)
    assert any(attention.sinks is not None for attention in attentions) is model_class.has_sinks
