"""Loading a model from a directory or a Hub id: config.json, then the weights streamed into the parameters."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from vllm_blend.checks import closest
from vllm_blend.distributed.ranks import ONE_RANK, Ranks
from vllm_blend.layers.layernorm import RMSNorm
from vllm_blend.layers.linear import Linear
from vllm_blend.layers.quantization import QuantizingRMSNorm, check_quantization
from vllm_blend.models.block_layers import why_no_blocks
from vllm_blend.models.causal_lm import CausalLM, as_causal_lm
from vllm_blend.models.config_sizes import check_config_sizes
from vllm_blend.models.decoder import DecoderForCausalLM
from vllm_blend.models.gguf.config import gguf_config
from vllm_blend.models.gguf.header import read_header
from vllm_blend.models.gguf.names import gguf_path
from vllm_blend.models.gguf.tensors import quantized_types
from vllm_blend.models.hf_overrides import HfOverrides, apply_hf_overrides
from vllm_blend.models.int4_layers import why_none
from vllm_blend.models.registry import MODEL_REGISTRY, resolve_model_class
from vllm_blend.models.text_parts import TextPart, text_config
from vllm_blend.models.weight_formats import weight_format
from vllm_blend.models.weight_formats.base import WeightFormat
from vllm_blend.models.weights import (
    PICKLES,
    SAFETENSORS,
    check_sizes,
    fill_from_files,
    find_weight_files,
    has_own_head,
    layouts_of,
)
from vllm_blend.models.without_compiler import without_compiler

logger = logging.getLogger(__name__)

LOAD_FORMATS = ("auto", "dummy")
HUB_PROBE_SECONDS = 5.0  # within which the Hub is asked whether a name that looks like a path is a model of its own
DUMMY_SEED = 0
DUMMY_STD = 0.02  # the usual initializer_range: activations stay finite at any depth


def load_hf_config(
    model: str,
    revision: str | None = None,
    trust_remote_code: bool = False,
    hf_overrides: HfOverrides | None = None,
) -> Any:
    """Return the transformers config of a local directory, a GGUF file (`gguf_path`) or a Hub id, changed by
    `hf_overrides`. Of a multimodal model, it is that of the text part.

    Raises FileNotFoundError if the directory or its config.json is missing or the Hub does not have it, ValueError if
    config.json is damaged, if it or the overrides describe something that transformers does not know, and for the sizes
    that `check_config_sizes` refuses.
    """
    gguf = gguf_path(model, revision)
    with without_compiler():
        if gguf is not None:
            config = gguf_config(read_header(gguf))
        else:
            config = text_config(_load_hf_config(model, revision, trust_remote_code))
    if hf_overrides:
        config = apply_hf_overrides(config, hf_overrides)
    check_config_sizes(vars(config), f"the config of {model!r}")
    return config


def _load_hf_config(model: str, revision: str | None, trust_remote_code: bool) -> Any:
    if is_local(model):
        _check_local_config(Path(model))
    else:
        _check_mistyped_path(model, revision)
    try:
        return AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
    except OSError as error:
        hint = f"; of a repository of GGUF files give one, as in {model}:Q4_K_M" if "gguf" in model.lower() else ""
        raise FileNotFoundError(
            f"no config for {model!r}: it is not a local directory and could not be fetched from the Hub ({error})"
            + hint
        ) from error
    except Exception as error:  # transformers raises a type of its own for every kind of bad field
        fields, _ = PretrainedConfig.get_config_dict(model, revision=revision)
        check_config_sizes(fields, f"config.json of {model!r}")  # by some of which transformers has divided
        known = ", ".join(MODEL_REGISTRY.names())
        raise ValueError(
            f"config.json of {model!r} is not usable: {error}; supported architectures: {known}"
        ) from error


def load_model(
    hf_config: Any,
    model: str,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: str = "auto",
    *,
    max_position: int,
    revision: str | None = None,
    quantization: str | None = None,
    keeps_int4: bool = False,
    ranks: Ranks = ONE_RANK,
) -> CausalLM:
    """Build the model that `hf_config` names on `device` in `dtype`, filled and in eval mode, without gradients.

    `model` is the directory, GGUF file or Hub id with the weights; `load_format="dummy"` fills small random weights of
    a fixed seed instead and reads no file. `max_position` is the number of positions served (max_model_len): it sizes
    the RoPE tables. With quantization="fp8" linear layers are quantised matrix by matrix as they are filled: only one
    at a time is on the device in `dtype`. With `keeps_int4` layers keep the 4-bit weights of a checkpoint, and the
    blocks of a GGUF file, where this device multiplies them; a warning names what is dequantized, and why. Of several
    `ranks` each builds, and reads, its own share of the layers.

    Raises ValueError for an unsupported architecture, checkpoint or quantization, TypeError for a registered class that
    is no `CausalLM`, and FileNotFoundError if there are no weights.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, got {load_format!r}")
    device = torch.device(device)
    try:
        stored_as = weight_format(hf_config)
    except ValueError as error:
        raise ValueError(f"{model!r} is quantized in a way that cannot be read: {error}") from error
    check_quantization(quantization, dtype, device)
    model_class = resolve_model_class(hf_config)
    gguf = gguf_path(model, revision)
    files = []
    if load_format == "auto":
        files = find_weight_files(weights_directory(model, revision)) if gguf is None else [gguf]
    if files and issubclass(model_class, DecoderForCausalLM):
        with _naming(gguf):
            check_sizes(files, hf_config.num_hidden_layers, hf_config.vocab_size)
    if files and issubclass(model_class, TextPart):
        hf_config = copy.copy(hf_config)  # what the two configs say of it, or leave out, is not always true
        hf_config.tie_word_embeddings = not has_own_head(files)
    has_int4 = load_format == "auto" and stored_as is not None and stored_as.keeps_int4
    asks = keeps_int4 and quantization is None and has_int4
    reason = why_none(dtype, device, ranks) if asks else None
    if has_int4 and not keeps_int4:
        reason = "4-bit weights are not to be kept (dequantize_weights)"
    keeps = asks and reason is None
    is_quantized = gguf is not None and bool(files) and bool(quantized_types(read_header(gguf)))
    if is_quantized:
        reason = why_no_blocks(dtype, device, ranks) if keeps_int4 else "blocks are not to be kept (dequantize_weights)"
    keeps_blocks = is_quantized and reason is None
    # A model whose matrices stay in 4 bits may not fit the device with others. Memory of the host that nothing is
    # written to takes none.
    with construct_as(dtype, torch.device("cpu") if keeps else device):
        built = _build(model_class, hf_config, max_position, quantization, ranks)
    causal_lm = as_causal_lm(built)
    if load_format == "auto":
        if ranks.rank == 0 and not (keeps or keeps_blocks):
            nbytes = sum(parameter.nbytes for parameter in built.parameters())
            _warn_of_dequantization(model, stored_as, gguf, dtype, quantization, reason, ranks.size, nbytes)
        with _naming(gguf):
            layers = fill_from_files(built, files, stored_as, device if keeps else None, keeps_blocks)
        layers.log(model, str(dtype).removeprefix("torch."))
    else:
        fill_dummy(built)
    if quantization is not None or keeps:
        torch.cuda.empty_cache()  # matrices on their way: what sizes the KV cache asks the device what is free
    built.requires_grad_(False).eval()
    return causal_lm


@contextmanager
def _naming(gguf: Path | None) -> Iterator[None]:
    """Name the GGUF file in errors that are about its tensors, and say what to do."""
    try:
        yield
    except ValueError as error:
        if gguf is None or str(error).startswith(str(gguf)):
            raise
        raise ValueError(
            f"{gguf}: {error}; fetch the file again, or give the directory of the same model in safetensors"
        ) from error


def _warn_of_dequantization(
    model: str,
    stored_as: WeightFormat | None,
    gguf: Path | None,
    dtype: torch.dtype,
    quantization: str | None,
    reason: str | None,
    num_ranks: int,
    nbytes: int,
) -> None:
    keeps_fp8 = stored_as is not None and stored_as.keeps_fp8
    if quantization is not None and keeps_fp8:
        return  # the linear layers are e4m3 again, and remain what they were if their scales are those of rows
    if stored_as is not None:
        name, stores = stored_as.name, stored_as.stores
    else:
        name, stores = "gguf", ", ".join(quantized_types(read_header(gguf))) if gguf is not None else ""
    if not stores:
        return
    hint = ""
    if keeps_fp8 and num_ranks == 1:  # several ranks refuse the option
        hint = "; quantization='fp8' keeps them in FP8 on a GPU that multiplies it"
    logger.warning(
        "the matrices of %s are quantized (%s: %s) and are dequantized to %s at load, as %s: they take the memory, and "
        "give the speed, of an unquantized model (%.2f GiB here)%s",
        model,
        name,
        stores,
        quantization or str(dtype).removeprefix("torch."),
        reason or "no kernels here multiply them as they are",
        nbytes / 2**30,
        hint,
    )


def _build(
    model_class: type[nn.Module], hf_config: Any, max_position: int, quantization: str | None, ranks: Ranks
) -> nn.Module:
    if ranks.size == 1:
        return model_class(hf_config, max_position, quantization)  # a user's class need not know of ranks
    return model_class(hf_config, max_position, quantization, ranks)  # check_ranks_fit: it knows of them


def is_local(model: str) -> bool:
    """Return whether `model` names a directory rather than a Hub id.

    Raises FileNotFoundError for a path that does not exist, or that is a file.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return True
    if path.exists():
        raise FileNotFoundError(
            f"model {model!r} is a file: give the directory that holds config.json and the weights, or a *.gguf file"
        )
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise FileNotFoundError(f"model directory {model!r} does not exist: give a directory or a Hugging Face id")
    return False


def _check_mistyped_path(model: str, revision: str | None) -> None:
    """Raise FileNotFoundError for a name whose folder exists, that is not in the Hub's cache, while the Hub cannot be
    reached: it is most likely a path. The Hub's own client would try again for 23 seconds before it fails."""
    folder = Path(model).parent
    if "/" not in model or not folder.is_dir():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        if not isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
            HfApi().model_info(model, revision=revision, timeout=HUB_PROBE_SECONDS)
    except (HfHubHTTPError, HFValidationError):
        return  # the reason comes with the attempt to load it
    except Exception as error:  # of whichever network library the client uses
        meant = closest(model, (str(path) for path in folder.iterdir() if path.is_dir()))
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise FileNotFoundError(
            f"model directory {model!r} does not exist, and the Hub cannot be asked for a model of this name "
            f"({error}): give a directory or a Hugging Face id{hint}"
        ) from error


def weights_directory(model: str, revision: str | None = None) -> Path:
    """Return the directory of a local model, or that of a Hub snapshot after downloading its weights: safetensors
    files, or PyTorch's pickles where it has no others."""
    if is_local(model):
        return Path(model).expanduser()
    from huggingface_hub import snapshot_download

    try:
        for _, index, pattern in (SAFETENSORS, PICKLES):
            found = Path(snapshot_download(model, revision=revision, allow_patterns=[pattern, index]))
            if any(found.glob(pattern)):
                break
    except Exception as error:  # network, authentication and naming errors share no base class
        raise FileNotFoundError(f"could not fetch the weights of {model!r} from the Hub: {error}") from error
    return found


@torch.no_grad()
def fill_dummy(model: nn.Module) -> None:
    """Fill normal weights of a fixed seed, quantised or not; norms are 1, so that activations keep their scale. Ranks
    that share a model have parts of the same weights."""
    norms = {id(module.weight) for module in model.modules() if isinstance(module, (RMSNorm, QuantizingRMSNorm))}
    quantized = {id(m.weight): m for m in model.modules() if isinstance(m, Linear) and m.weight_scale is not None}
    shared = {id(getattr(m, name)): layout for m in model.modules() for name, layout in layouts_of(m).items()}
    generators: dict[torch.device, torch.Generator] = {}
    for parameter in model.parameters():
        if id(parameter) in norms:
            parameter.fill_(1)
            continue
        if parameter.device not in generators:
            generators[parameter.device] = torch.Generator(parameter.device).manual_seed(DUMMY_SEED)
        generator = generators[parameter.device]
        linear, layout = quantized.get(id(parameter)), shared.get(id(parameter))
        if layout is not None:
            whole = torch.empty(layout.shape, dtype=parameter.dtype, device=parameter.device)
            layout.copy_(whole.normal_(0, DUMMY_STD, generator=generator))
        elif linear is None:
            parameter.normal_(0, DUMMY_STD, generator=generator)
        else:  # the weights of the same model without quantisation, quantised
            values = torch.empty_like(parameter, dtype=linear.dtype).normal_(0, DUMMY_STD, generator=generator)
            linear.weight_destination().copy_(values)


def _check_local_config(directory: Path) -> None:
    path = directory.expanduser() / "config.json"
    if not path.is_file():
        files = sorted(directory.expanduser().glob("*.gguf"))
        what = f"the path of a GGUF file, {str(files[0])!r}" if files else "the directory of a Hugging Face model"
        raise FileNotFoundError(f"{directory} has no config.json: give {what}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or JSON of too many levels
        raise ValueError(f"{path} is not valid JSON ({error}): fetch it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")


@contextmanager
def construct_as(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Give new parameters `dtype` and `device` at once, without a float32 copy on the host first."""
    if not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {dtype}")
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(previous)
