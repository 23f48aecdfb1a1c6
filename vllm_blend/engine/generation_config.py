"""A model's generation_config.json: the sampling settings its authors recommend, and the tokens that end a text."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PretrainedConfig

from vllm_blend.checks import require
from vllm_blend.config import GENERATION_SETTINGS, ModelConfig
from vllm_blend.models.gguf.names import gguf_path
from vllm_blend.models.loader import is_local
from vllm_blend.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"


def load_generation_config(config: ModelConfig, hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return what the generation config says: that of the model at its revision, or of the path that
    `ModelConfig.generation_config` names. A GGUF file has none: that of the given tokenizer's folder or repository
    counts. A model without one is asked for sampling settings through its config.json, as older models keep them there.

    Raises ValueError when the file is damaged, and when a named path has none. Warns if the Hub does not say whether
    the model has one.
    """
    own = config.generation_config in ("auto", "vllm")
    source, revision = (config.model, config.revision) if own else (config.generation_config, None)
    try:
        if own and config.tokenizer is not None and gguf_path(config.model, config.revision) is not None:
            source = config.tokenizer
        path = _find(source, revision)
    except FileNotFoundError as error:
        if not own:
            raise ValueError(f"generation_config={source!r}: {error}") from error
        logger.warning(
            "%s: %s; if the repository has one, its end tokens and sampling settings are not used: name a folder that "
            "has it in generation_config, or give 'vllm' for no settings",
            source,
            error,
        )
        path = None
    if path is None:
        require(
            own,
            f"generation_config={source!r} has no {FILE_NAME}: name a folder or a Hugging Face id that has one, or use "
            "'auto' or 'vllm'",
        )
        settings: dict[str, Any] = GenerationConfig.from_model_config(hf_config).to_diff_dict()
        settings.pop("eos_token_id", None)  # config.json says so, and no generation config
        return settings
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or JSON of too many levels
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    require(isinstance(content, dict), f"{path} must hold a JSON object, got {type(content).__name__}")
    return {name: value for name, value in content.items() if value is not None}


def default_sampling_settings(config: ModelConfig, generation: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `SamplingParams` that requests get which bring none: those of the generation config
    unless `ModelConfig.generation_config` is "vllm", and those of `override_generation_config` over them.

    Raises ValueError when a value cannot be a sampling setting.
    """
    found = {} if config.generation_config == "vllm" else generation
    recommended = {name: found[name] for name in GENERATION_SETTINGS if name in found}
    merged = recommended | (config.override_generation_config or {})
    settings = {GENERATION_SETTINGS[name]: value for name, value in merged.items()}
    try:
        SamplingParams(**settings)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{FILE_NAME} of {config.model!r}, or override_generation_config, does not fit sampling: {error}; to leave "
            "the file's settings out, give generation_config='vllm'"
        ) from error
    if recommended and config.generation_config == "auto":
        logger.warning(
            "requests without sampling_params use settings of the model's %s: %s; for vLLM's own defaults give "
            "generation_config='vllm'",
            FILE_NAME,
            recommended,
        )
    return settings


def _find(source: str, revision: str | None) -> Path | None:
    """Return the path of the file in a folder, or of a repository's after downloading it; None if there is none.

    Raises FileNotFoundError if the Hub does not say whether a repository has one.
    """
    if gguf_path(source, revision) is not None:
        return None
    if is_local(source):
        path = Path(source).expanduser() / FILE_NAME
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
    )

    try:
        return Path(hf_hub_download(source, FILE_NAME, revision=revision))
    except LocalEntryNotFoundError as error:
        if try_to_load_from_cache(source, FILE_NAME, revision=revision) is not None:
            return None  # an earlier download has noted that the repository has none
        raise FileNotFoundError(f"the Hub cannot be reached, and its cache has no {FILE_NAME}") from error
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError) as error:
        raise FileNotFoundError(f"the Hub does not give its {FILE_NAME} ({error})") from error
