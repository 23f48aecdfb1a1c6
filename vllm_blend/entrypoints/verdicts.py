"""Verdicts of `check-model` where they are kept, and what a server says of its model's one.

A verdict is about weights in a dtype. It lies in `blend_verdict.json` in the chunk store's folder, in the model's, or
beside a model that is one file.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_blend.blend.encoding_contexts import resolve_name
from vllm_blend.blend.selectors import make_selector
from vllm_blend.config import EngineConfig
from vllm_blend.devices import resolve_device, resolve_dtype
from vllm_blend.engine.setup import checkpoint_dtype
from vllm_blend.kv_store.keys import weights_digest
from vllm_blend.models.gguf.header import parts_of
from vllm_blend.models.gguf.names import gguf_path
from vllm_blend.models.loader import load_hf_config

logger = logging.getLogger(__name__)

FILE = "blend_verdict.json"
PASSES = "passes"


@dataclass(frozen=True)
class KeptVerdict:
    """A verdict from a file: "passes", "uncertain" or "fails", in words, and the settings that were measured, each with
    a state of its own."""

    path: Path
    state: str
    text: str
    settings: list[dict[str, Any]]

    def state_of(self, rule: str, ratio: float, company: str) -> str | None:
        """Return the state of a setting, None if it was not measured."""
        for each in self.settings:
            same = each["ratio"] == ratio and each["company"] == company
            if same and _is_rule(each["rule"], rule):
                return str(each["state"])
        return None


def _is_rule(kept: str, rule: str) -> bool:
    """Return whether a kept verdict is about a rule. It may name one that another version had."""
    try:
        return make_selector(kept) == make_selector(rule)
    except ValueError:
        return False


def identity(config: EngineConfig) -> str:
    """Return what a verdict is about: a digest of the weights, their dtype, and options that change what the model
    computes."""
    model = config.model
    local = gguf_path(model.model) or Path(model.model)
    weights = weights_digest(*parts_of(local)) if local.exists() else f"{model.model}@{model.revision or 'main'}"
    hf_config = load_hf_config(model.model, model.revision, model.trust_remote_code, model.hf_overrides)
    dtype = resolve_dtype(model.dtype, checkpoint_dtype(hf_config), resolve_device(model.device))
    parts = [weights, str(dtype).removeprefix("torch.")]
    parts += [model.quantization] if model.quantization else []
    parts += [f"KV {config.cache.kv_cache_dtype}"] if config.cache.kv_cache_dtype != "auto" else []
    parts += [f"overrides {model.hf_overrides!r}"] if model.hf_overrides else []
    return ", ".join(parts)


def places(config: EngineConfig, folder: str | None = None) -> list[Path]:
    """Return the files that may hold the verdict on a model, the first that does counts: in the chunk store's folder
    (or the one given), and beside the model if that is here."""
    store, model = folder or config.chunk_store.path, config.model.model
    found = [] if store is None else [Path(store) / FILE]
    file = gguf_path(model)
    if file is not None:
        found.append(file.with_name(f"{file.name}.{FILE}"))
    elif Path(model).is_dir():
        found.append(Path(model) / FILE)
    return found


def writable_place(config: EngineConfig, folder: str | None = None) -> Path | None:
    """Return the first of the `places` that can be written; None if there is none."""
    for path in places(config, folder):
        there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        if os.access(there, os.W_OK):
            return path
    return None


def read_verdict(config: EngineConfig) -> KeptVerdict | None:
    """Return the kept verdict on the model of an engine, None if there is none. A file that cannot be read counts as
    none, and a warning names it."""
    name = None
    for path in places(config):
        if not path.is_file():
            continue
        name = identity(config) if name is None else name
        kept = _verdicts_in(path).get(name)
        if kept is not None:
            return KeptVerdict(path, kept["state"], kept["text"], kept["settings"])
    return None


def _verdicts_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return the verdicts of a file by what they are about. Those that are not such are left out, with a warning."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read (%s): it counts as no verdict", path, error)
        return {}
    verdicts = content.get("verdicts") if isinstance(content, dict) else None
    if not isinstance(verdicts, dict) or not all(map(_is_verdict, verdicts.values())):
        logger.warning("%s holds something else than verdicts of check-model: it counts as none", path)
        return {}
    return verdicts


def _is_verdict(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("settings"), list):
        return False
    texts = all(isinstance(value.get(name), str) for name in ("state", "text"))
    return texts and all(
        isinstance(s, dict) and s.keys() >= {"rule", "ratio", "company", "state"} for s in value["settings"]
    )


def keep_verdict(path: Path, name: str, verdict: dict[str, Any]) -> None:
    """Write the verdict on what has the `identity` `name` into a file, beside those that it has."""
    verdicts = _verdicts_in(path) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"verdicts": verdicts | {name: verdict}}, indent=1, ensure_ascii=False)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def announce(config: EngineConfig, is_required: bool) -> None:
    """Log what is known of blending the model of an engine. Raises ValueError if a passing verdict on the engine's own
    settings `is_required` and there is none."""
    rule, ratio, company = served_setting(config)
    served = f"This server blends by {rule} at {100 * ratio:g}%, after {company}"
    kept = read_verdict(config)
    state = None if kept is None else kept.state_of(rule, ratio, company)
    if kept is None:
        said = "there is no verdict on blending this model"
    else:
        found = "was not measured" if state is None else f"counts as {state!r}"
        said = f"the verdict on blending this model, in {kept.path}: {kept.text}\n{served}, which {found}"
    if is_required and state != PASSES:
        raise ValueError(
            f"require_verdict: {said}; serve with settings that pass, run `vllm-blend check-model "
            f"{config.model.model} --data FILE`, or give --no-enable-blending"
        )
    logger.log(logging.INFO if kept is None or state == PASSES else logging.WARNING, "%s", said)


def served_setting(config: EngineConfig) -> tuple[str, float, str]:
    """Return the rule, the ratio and the company of prompts that do not ask for others."""
    blend = config.blend
    selector = make_selector(blend.selector)
    own = selector.default_ratio if blend.recompute_ratio is None else blend.recompute_ratio
    ratio = own if selector.fixed_ratio is None else selector.fixed_ratio
    return blend.selector, ratio, resolve_name(blend.encoding_context, not config.model.skip_tokenizer_init)
