"""Read LMCache's configuration as arguments of this engine.

`LMCACHE_CONFIG_FILE` names a YAML file; without it, variables such as LMCACHE_ENABLE_BLENDING are read. The keys of
both generations of LMCache are known: local_device and blend_separator, local_cpu and blend_special_str. Sizes in GB
are taken as GiB, as in LMCache. A key that is null counts as not given.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from vllm_blend.checks import check_layer_numbers, check_ratio, check_shares
from vllm_blend.devices import resolve_device
from vllm_blend.lmcache.values import Values

logger = logging.getLogger(__name__)

FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
VARIABLE_PREFIX = "LMCACHE_"
NOT_SETTINGS = {FILE_VARIABLE, "LMCACHE_USE_EXPERIMENTAL", "LMCACHE_LOG_LEVEL", "LMCACHE_TRACK_USAGE"}

DEFAULT_SEPARATOR = "[BLEND_SEP]"
DEFAULT_MIN_TOKENS = 256
# CacheBlend's rule compares layers. Without layers, tokens are chosen one by one: the engine's own default looks for
# pages that begin with their subject, and texts that are precomputed here often hold several.
LAYER_SELECTOR, TOKEN_SELECTOR = "value_deviation", "question_attention"

TEXTS = {"local_device", "local_disk", "remote_url", "remote_serde", "blend_separator", "blend_special_str"}
KEYS = TEXTS | {
    "chunk_size",
    "local_cpu",
    "max_local_cpu_size",
    "max_local_cache_size",
    "max_local_disk_size",
    "use_layerwise",
    "enable_blending",
    "blend_recompute_ratio",
    "blend_recompute_ratios",
    "blend_check_layers",
    "blend_min_tokens",
    "blend_add_special_in_precomp",
}

OUTLIVES = {
    "chunk_store_path",
    "chunk_store_gib",
    "chunk_store_url",
}  # stores that outlive the process

Arguments = dict[str, tuple[str | None, Any]]  # engine argument -> (key, None for a default, and value)


@dataclass(frozen=True)
class LMCacheConfig:
    """The settings that a configuration asks for. `engine_args` are arguments of `LLM`; `keys` has the configuration's
    key for each of them that is not a default."""

    source: str
    separator: str = DEFAULT_SEPARATOR
    engine_args: Mapping[str, Any] = field(default_factory=dict, repr=False)  # a URL may hold a password
    keys: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()  # keys that need enable_blending, which is off
    unread: tuple[str, ...] = ()  # variables with settings, which are not read beside a file

    @property
    def enable_blending(self) -> bool:
        return bool(self.engine_args["enable_blending"])

    def warn(self) -> None:
        """Log the keys that have no effect."""
        if self.unknown:
            logger.warning("%s: unknown and without effect: %s", self.source, ", ".join(self.unknown))
        if self.idle:
            logger.warning(
                "%s: without effect while enable_blending is off, as only chunks of blended prompts are stored: %s",
                self.source,
                ", ".join(self.idle),
            )
        if self.unread:
            logger.warning("%s: without effect, as the file takes precedence: %s", self.source, ", ".join(self.unread))

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `LLM`: those of the configuration, and those that its caller has `given`, which
        replace defaults.

        Raises ValueError if the two contradict each other.
        """
        for name, key in self.keys.items():
            if name in given and given[name] != self.engine_args[name]:
                raise ValueError(
                    f"{self.source} has {key}, which means {name}={self.engine_args[name]!r}, but LLM was given "
                    f"{name}={given[name]!r}: keep one of the two"
                )
        if self.engine_args.get("blend_chunk_device") == "cuda":
            device = resolve_device(given.get("device", "auto"))
            if device.type != "cuda":
                raise ValueError(
                    f"{self.source}: local_device='cuda', but the engine runs on the {device.type}: use "
                    "local_device: cpu"
                )
        return {**self.engine_args, **given}

    def translate_error(self, message: str) -> str:
        """Return an error message of the engine with the configuration's keys in place of the engine's arguments."""
        if message.startswith(self.source) or not self.keys.keys() & set(re.findall(r"\w+", message)):
            return message
        return f"{self.source}: " + re.sub(r"\w+", lambda word: self.keys.get(word[0], word[0]), message)


def load_config(environment: Mapping[str, str] | None = None) -> LMCacheConfig:
    """Return the configuration that the environment names or holds. Raises ValueError that names the file, the key and
    the fix."""
    environment = os.environ if environment is None else environment
    path = environment.get(FILE_VARIABLE)
    values = _from_variables(environment) if path is None else Values(path, _read_yaml(path))
    _check_inert(values)
    separator, blend, storage = _separator(values), _blend(values), _storage(values)
    enabled = values.flag("enable_blending")
    arguments: Arguments = {"enable_blending": ("enable_blending" if enabled is not None else None, bool(enabled))}
    idle = () if enabled else tuple(sorted(key for name, (key, _) in storage.items() if key and name in OUTLIVES))
    if enabled:
        arguments |= blend | storage
    return LMCacheConfig(
        values.source,
        separator,
        {name: value for name, (_, value) in arguments.items()},
        {name: key for name, (key, _) in arguments.items() if key is not None},
        tuple(sorted(set(values) - KEYS)),
        idle,
        () if path is None else tuple(sorted(name for name in environment if _key_of(name) in KEYS)),
    )


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
        node = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{FILE_VARIABLE}={path!r} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{FILE_VARIABLE}={path!r} is not YAML: {error}") from error
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise ValueError(
            f"{FILE_VARIABLE}={path!r} holds no settings: write YAML, with a line such as 'enable_blending: true' for "
            "each"
        )
    names = [str(key.value) for key, _ in node.value]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{path}: {', '.join(twice)} is given twice: keep one of them")
    return {str(key): value for key, value in content.items()}


def _key_of(variable: str) -> str | None:
    """Return the setting that a variable is for, or None if it is not for any."""
    is_setting = variable.startswith(VARIABLE_PREFIX) and variable not in NOT_SETTINGS
    return variable.removeprefix(VARIABLE_PREFIX).lower() if is_setting else None


def _from_variables(environment: Mapping[str, str]) -> Values:
    found: dict[str, Any] = {}
    for name, text in environment.items():
        key = _key_of(name)
        if key is not None:
            try:
                found[key] = text if key in TEXTS or key not in KEYS else yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(f"the variable {name}={text!r} is not a YAML value: {error}") from error
    return Values(f"the variables {VARIABLE_PREFIX}*", found)


def _check_inert(values: Values) -> None:
    """Check keys that ask for what is done in any case, or for what is never done."""
    values.integer("chunk_size", 1)  # chunks are the pieces of a prompt, stored whole
    values.flag("use_layerwise")  # KV from the host always comes layer by layer
    if values.flag("blend_add_special_in_precomp"):
        raise values.error(
            "blend_add_special_in_precomp",
            "would put special tokens between the chunks: BOS stands once, before the prompt, and every chunk is "
            "encoded after it; leave this out",
        )
    serde = values.text("remote_serde")
    if serde not in (None, "naive", "torch"):
        raise values.error(
            "remote_serde", "is not known: use naive, which is bit for bit, or give LLM chunk_store_format='int8'"
        )


def _separator(values: Values) -> str:
    for key in sorted(values.nulls & {"blend_separator", "blend_special_str"}):
        raise ValueError(
            f"{values.source}: {key} has no value (a # begins a comment): put it in quotes, or leave it out"
        )
    old, new = values.text("blend_separator"), values.text("blend_special_str")
    if old is not None and new is not None and old != new:
        raise values.contradiction("blend_separator", "blend_special_str")
    return old or new or DEFAULT_SEPARATOR


def _blend(values: Values) -> Arguments:
    ratio, ratios = values.number("blend_recompute_ratio"), values.numbers("blend_recompute_ratios")
    layers = values.numbers("blend_check_layers")
    with values.naming_source():
        check_ratio("blend_recompute_ratio", ratio)
        if layers is not None:
            check_layer_numbers("blend_check_layers", layers)
        if ratios is not None and (len(ratios) > 1 or layers is not None):
            check_shares("blend_recompute_ratios", ratios, layers or [1])
        elif ratios is not None:
            check_ratio("blend_recompute_ratios", ratios[0])
    if ratio is not None and ratios is not None and ratios != [ratio]:
        raise values.contradiction("blend_recompute_ratio", "blend_recompute_ratios")
    arguments: Arguments = {"blend_min_tokens": (None, DEFAULT_MIN_TOKENS), "blend_selector": (None, TOKEN_SELECTOR)}
    min_tokens = values.integer("blend_min_tokens", 0)
    if min_tokens is not None:
        arguments["blend_min_tokens"] = ("blend_min_tokens", min_tokens)
    if ratios is not None and len(ratios) > 1:
        arguments["blend_recompute_ratios"] = ("blend_recompute_ratios", ratios)
    elif ratios is not None:
        arguments["blend_recompute_ratio"] = ("blend_recompute_ratios", ratios[0])
    elif ratio is not None:
        arguments["blend_recompute_ratio"] = ("blend_recompute_ratio", ratio)
    if layers is not None:
        arguments["blend_check_layers"] = ("blend_check_layers", layers)
        arguments["blend_selector"] = (None, LAYER_SELECTOR)
    return arguments


def _storage(values: Values) -> Arguments:
    arguments: Arguments = {}
    device, local_cpu = values.text("local_device"), values.flag("local_cpu")
    on_disk = device is not None and device not in ("cpu", "cuda")
    if on_disk and "/" not in str(device):
        raise values.error("local_device", "is not known: use cpu, cuda or a folder such as file:///var/cache/lmcache/")
    if (device == "cuda" and local_cpu) or (device == "cpu" and local_cpu is False):
        raise values.contradiction("local_device", "local_cpu")
    if not on_disk and device is not None:
        arguments["blend_chunk_device"] = ("local_device", device)
    elif local_cpu:
        arguments["blend_chunk_device"] = ("local_cpu", "cpu")

    folders = {key: values.folder(key) for key in ("local_disk", *(["local_device"] if on_disk else []))}
    arguments |= _resolve(values, "chunk_store_path", folders)
    old_size = {"max_local_cache_size": values.number("max_local_cache_size", 0)}
    disk_size = {"max_local_disk_size": values.number("max_local_disk_size", 0) or None}  # 0: there is no disk
    memory_size = {"max_local_cpu_size": values.number("max_local_cpu_size", 0)}
    for key, size in (old_size | memory_size).items():
        if size == 0:
            raise values.error(key, "leaves no memory to work in: give some, in GB")
    arguments |= _resolve(values, "chunk_store_gib", (disk_size | old_size) if on_disk else disk_size)
    arguments |= _resolve(values, "blend_chunk_cache_gib", memory_size if on_disk else memory_size | old_size)
    if "chunk_store_gib" in arguments and "chunk_store_path" not in arguments:
        raise values.error("max_local_disk_size", "has no disk to count on: give local_disk too, or leave it out")
    if values.text("remote_url") is not None:
        arguments["chunk_store_url"] = ("remote_url", values.text("remote_url"))
    return arguments


def _resolve(values: Values, argument: str, given: Mapping[str, Any]) -> Arguments:
    """Return the value of an argument that several keys may give. Raises ValueError if they disagree."""
    found = {key: value for key, value in given.items() if value is not None}
    if len({str(value) for value in found.values()}) > 1:
        raise values.contradiction(*found)
    return {argument: next(iter(found.items()))} if found else {}
