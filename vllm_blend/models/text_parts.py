"""The text models inside multimodal ones: their config and their weights; images are not served, and their weights stay
on the disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PretrainedConfig

from vllm_blend.models.gemma3 import Gemma3ForCausalLM
from vllm_blend.models.llama import MistralForCausalLM
from vllm_blend.models.stored import StoredTensor

# Of the text model's tensors: how their names begin in checkpoints, newer and older, and here.
PREFIXES = {"model.language_model.": "model.", "language_model.": "", "lm_head.": "lm_head."}


class TextPart:
    """Marks a model class that is the text part of a multimodal architecture, of which it has the name."""

    is_text_part: ClassVar[bool] = True


class Gemma3ForConditionalGeneration(TextPart, Gemma3ForCausalLM):
    """The text part of Gemma 3 with vision (4B and larger)."""

    serves = "the text of Gemma 3 with vision (4B and larger)"


class Mistral3ForConditionalGeneration(TextPart, MistralForCausalLM):
    """The text part of Mistral Small 3.1 and later, and of Ministral 3."""

    serves = "the text of Mistral Small 3.1 and later, and of Ministral 3"


ARCHITECTURES = {one.__name__: one for one in (Gemma3ForConditionalGeneration, Mistral3ForConditionalGeneration)}


def text_config(hf_config: Any) -> Any:
    """Return the config of a multimodal model's text part under the architecture's own name; others as they are."""
    architectures = getattr(hf_config, "architectures", None) or []
    if not any(name in ARCHITECTURES for name in architectures):
        return hf_config
    text = hf_config.get_text_config()
    if text is hf_config or not isinstance(text, PretrainedConfig):
        raise ValueError(
            f"the config of {architectures[0]} has no text_config that its model_type "
            f"({getattr(hf_config, 'model_type', None)!r}) knows: it is not one of a multimodal model"
        )
    text.architectures = architectures
    for name in ("quantization_config", "dtype", "eos_token_id"):
        value = getattr(hf_config, name, None)
        if value is not None:
            setattr(text, name, value)
    text.tie_word_embeddings = bool(hf_config.tie_word_embeddings)
    return text


def text_tensors(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of the text part under the names that they have in a model of text alone. Raises ValueError
    for two of one name."""
    renamed: dict[str, StoredTensor] = {}
    given: dict[str, str] = {}
    for name, tensor in stored.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is not None:
            own = PREFIXES[prefix] + name.removeprefix(prefix)
            if own in renamed:
                raise ValueError(f"the checkpoint has {given[own]} and {name}, which are the same: fetch it again")
            renamed[own], given[own] = tensor, name
    return renamed
