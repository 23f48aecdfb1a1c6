"""Environment variables of `vllm serve`: those that are honoured, those that the server refuses to start with, because
it would behave otherwise than they ask, and all others, which are named in a warning."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from vllm_blend.checks import require
from vllm_blend.unsupported import NO_PROFILER

logger = logging.getLogger(__name__)

_NO_LORA = "merge the LoRA adapter into the weights and serve the merged model"
_NO_PLUGINS = "the server loads no plugins"
_LOGGING = "give --log-format and --uvicorn-log-level"
_OFF = ("", "0", "false", "no", "off")

# The name -> the option of the server that it sets. An option that is given wins.
SETS_OPTION: dict[str, str] = {"VLLM_API_KEY": "api_key", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "timeout_keep_alive"}
# Read where they matter.
READ_ELSEWHERE = frozenset(("VLLM_CPU_KVCACHE_SPACE", "VLLM_FLAT_LOGPROBS", "VLLM_MAX_N_SEQUENCES"))
# The name -> why the server does not start with it, or what to do instead. Values of `_OFF` ask for nothing.
REFUSED: dict[str, str] = {
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _NO_LORA,
    "VLLM_LORA_RESOLVER_CACHE_DIR": _NO_LORA,
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "the model's own length is the limit: give rope_parameters in --hf-overrides",
    "VLLM_BATCH_INVARIANT": "sums in another order may round otherwise when a batch changes: leave it out",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "give --step-timeout",
    "VLLM_LOGGING_CONFIG_PATH": _LOGGING,
    "VLLM_PLUGINS": _NO_PLUGINS,
    "VLLM_SERVER_DEV_MODE": "there are no endpoints for development, such as /sleep and /reset_prefix_cache",
    "VLLM_TORCH_PROFILER_DIR": NO_PROFILER,
    "VLLM_TORCH_CUDA_PROFILE": NO_PROFILER,
    "VLLM_USE_MODELSCOPE": "models come from the Hugging Face Hub, or from a folder: download the model",
}
# What Kubernetes sets in every pod beside a service of the name vllm or vllm-...: it asks for nothing.
_OF_KUBERNETES = re.compile(r"VLLM_(\w+_)?(SERVICE_(HOST|PORT\w*)|PORT(_\d+_\w+)?)")
_OF_THIS_PROJECT = "VLLM_BLEND_"


def apply_environment(options: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of the server with those that environment variables of vLLM set. Values are never shown.

    Raises ValueError for a variable that asks for what the server would not do. What changes nothing is a warning.
    """
    values, unread = dict(options), []
    for name, value in environment.items():
        if not name.startswith("VLLM_") or name.startswith(_OF_THIS_PROJECT):
            continue
        if name in SETS_OPTION:
            _set(values, name, value)
        elif name in REFUSED and value.strip().lower() not in _OFF:
            raise ValueError(f"the environment variable {name} is not supported: {REFUSED[name]}; unset it")
        elif name not in READ_ELSEWHERE and name not in REFUSED and not _OF_KUBERNETES.fullmatch(name):
            unread.append(name)
    if unread:
        logger.warning("environment variables that change nothing here: %s", ", ".join(sorted(unread)))
    return values


def _set(values: dict[str, Any], name: str, value: str) -> None:
    option = SETS_OPTION[name]
    flag = "--" + option.replace("_", "-")
    # An empty key would leave the server open to everyone, which nobody who sets the variable wants.
    require(value.strip() != "", f"the environment variable {name} is empty: give it a value, or unset it")
    if option in values:
        logger.warning("the environment variable %s is ignored, as %s is given", name, flag)
        return
    if option == "api_key":
        values[option] = [value]
        return
    require(value.isdecimal(), f"the environment variable {name} must be whole seconds: give them, or unset it")
    values[option] = int(value)
