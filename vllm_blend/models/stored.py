"""The tensors of a checkpoint's files, by name, before anything of them is read."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from vllm_blend.checks import a_type
from vllm_blend.models.gguf.header import read_header
from vllm_blend.models.gguf.tensors import FusedExperts, GGUFTensor, gguf_tensors
from vllm_blend.ops.fp8 import QuantizedRows

READ_AT_ONCE = 1 << 27  # bytes of a file, before it is mapped anew
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class BadTensor(ValueError):
    """A tensor of a checkpoint that cannot be used, and why: the message names it."""


class Sliceable(Protocol):
    """What gives parts of a tensor: a tensor, or what reads only the part that is asked for."""

    def __getitem__(self, index: Any, /) -> torch.Tensor:
        """Return the part at an index, `()` for all of it."""


class StoredTensor(Protocol):
    """A tensor of a checkpoint, which may be made of several of a file's."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape, without reading the values."""

    def read(self) -> torch.Tensor:
        """Return all of it, as it is stored, on the host."""

    def source(self, device: torch.device) -> Sliceable:
        """Return what floating-point parts for memory on `device` are copied from. Raises `BadTensor` if it
        cannot be had."""

    def quantized_rows(self, device: torch.device) -> QuantizedRows | None:
        """Return the matrix in e4m3 with a scale for each row, if that is what it is stored as."""


class PlainTensor:
    """One tensor of a file, as it is there: `parts` is a slice of a safetensors file, or a tensor in mapped memory."""

    def __init__(self, name: str, path: Path, shape: tuple[int, ...], parts: Sliceable) -> None:
        self.name, self.path, self.shape, self._parts = name, path, shape, parts

    def read(self) -> torch.Tensor:
        return self[()]

    def __getitem__(self, index: Any) -> torch.Tensor:
        try:
            return self._parts[index if self.shape else ...]  # a scalar has no dimension to slice
        except (SafetensorError, OSError, RuntimeError) as error:  # RuntimeError: of types of less than a byte
            raise damaged(self.path, error) from error

    def source(self, device: torch.device) -> Sliceable:
        return _Floats(self)

    def quantized_rows(self, device: torch.device) -> QuantizedRows | None:
        return None


class _Floats:
    """Parts of a tensor that is stored in a floating-point type, which is checked as they are read."""

    def __init__(self, tensor: PlainTensor) -> None:
        self._tensor = tensor

    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self._tensor[index]
        if part.dtype not in FLOAT_DTYPES:
            raise BadTensor(
                f"{self._tensor.name} is stored as {part.dtype}: it is quantized, but config.json has no "
                "quantization_config that says how, or the checkpoint lacks the scales that it asks for"
            )
        return part


@contextmanager
def opened(files: Iterable[Path]) -> Iterator[dict[str, StoredTensor]]:
    """Open the files of a checkpoint, and yield their tensors by name.

    Raises ValueError for a file that is damaged, and for a tensor that is in two of them.
    """
    found: dict[str, StoredTensor] = {}
    where: dict[str, Path] = {}
    with ExitStack() as stack:
        for path in files:
            for tensor in _tensors(path, stack):
                if tensor.name in found:
                    raise ValueError(f"{tensor.name} is in {where[tensor.name].name} and again in {path.name}")
                found[tensor.name], where[tensor.name] = tensor, path
        yield found


def _tensors(path: Path, stack: ExitStack) -> Iterator[PlainTensor | GGUFTensor | FusedExperts]:
    if path.suffix.lower() == ".gguf":
        yield from gguf_tensors(read_header(path)).values()
    elif path.suffix == ".safetensors":
        file = stack.enter_context(closing(_Safetensors(path)))
        for name, shape in file.shapes().items():
            yield PlainTensor(name, path, shape, _InFile(file, name, is_scalar=not shape))
    else:
        for name, tensor in _unpickled(path).items():
            yield PlainTensor(name, path, tuple(tensor.shape), tensor)


class _Safetensors:
    """A file that is mapped into memory, and again after every so many bytes: what was read would stay there to the end
    beside the model that it has been copied into."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_read = path, 0
        self._file: Any = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors' shapes. Raises ValueError if the file is damaged."""
        try:
            file = self._opened()
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as error:
            raise damaged(self._path, error) from error

    def read(self, name: str, index: Any, is_scalar: bool) -> torch.Tensor:
        """Return a part of a tensor, which is valid as long as it is held."""
        file = self._opened()
        part: torch.Tensor = file.get_tensor(name) if is_scalar else file.get_slice(name)[index]
        self._num_read += part.nbytes
        return part

    def close(self) -> None:
        self._file, self._num_read = None, 0

    def _opened(self) -> Any:
        if self._num_read > READ_AT_ONCE:
            self.close()
        if self._file is None:
            self._file = safe_open(self._path, framework="pt", device="cpu")
        return self._file


class _InFile:
    """A tensor of a safetensors file, of which parts are read."""

    def __init__(self, file: _Safetensors, name: str, is_scalar: bool) -> None:
        self._file, self._name, self._is_scalar = file, name, is_scalar

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._file.read(self._name, index, self._is_scalar)


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a PyTorch pickle, mapped into memory. Nothing in it is run: `weights_only` knows tensors
    and plain containers, and refuses everything else."""
    try:
        content = _load_pickle(path)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} has more than tensors in it, which is not loaded as it could run code; convert it to safetensors "
            f"where you trust it ({str(error).splitlines()[0]})"
        ) from error
    except Exception as error:  # what torch raises for damage depends on the byte that is damaged
        raise ValueError(f"{path} is damaged or not a PyTorch checkpoint ({error}): fetch it again") from error
    if isinstance(content, Mapping) and set(content) == {"state_dict"}:
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise ValueError(f"{path} must hold a dict of tensors, but holds {a_type(content)}")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{path} must hold a dict of tensors, but {name!r} is {a_type(tensor)}: give the weights alone"
            )
        _check_dense(path, name, tensor)
    return dict(content)


def _check_dense(path: Path, name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError unless each entry of a tensor is stored in the file: a few bytes may stand for any number of
    entries otherwise."""
    is_plain = not (tensor.is_nested or tensor.is_quantized) and tensor.layout == torch.strided
    if not is_plain or tensor.device.type != "cpu":
        raise ValueError(
            f"{path}: {name} is sparse, nested, without values or quantized by PyTorch: save it as a plain tensor"
        )
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ValueError(
            f"{path}: {name} has shape {tuple(tensor.shape)}, but only {tensor.untyped_storage().nbytes()} bytes are "
            "stored of it: save it as a plain tensor"
        )


def _load_pickle(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError as error:
        if "mmap" not in str(error):
            raise
        # files of before torch 1.6 are no archives, and cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True)


def damaged(path: Path, error: Exception) -> ValueError:
    """Return the error for a file that safetensors cannot read."""
    return ValueError(f"{path} is damaged or not a safetensors file ({error}): fetch it again")
