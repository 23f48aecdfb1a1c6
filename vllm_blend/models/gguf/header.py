"""What a GGUF file has (version 2 and 3): its metadata, and where each tensor lies. Everything is checked against the
file's size before it is used, so a damaged file can neither be read beyond its end nor take memory that it has not."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # if the metadata name none
MAX_DIMENSIONS = 4
MAX_KEPT = 4096  # entries of an array of numbers that are kept; vocabularies are longer, and of no use here
_STRING, _ARRAY = 8, 9
# The types of metadata of one size, as struct calls them.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies in a file. `shape` is in torch's order; `kind` is ggml's number of its type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a file. Strings in arrays, and arrays that are long, are left out of `metadata`."""

    path: Path
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, TensorPlace] = field(repr=False)


def gguf_path(model: str) -> Path | None:
    """Return the path of a GGUF file, None if `model` names a directory or a Hub id instead."""
    path = Path(model).expanduser()
    return path if path.suffix.lower() == ".gguf" and not path.is_dir() else None


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a file. Raises FileNotFoundError if there is none, ValueError naming it if it is damaged, is
    no GGUF file, or needs a package that is missing."""
    sizes = _block_sizes()
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path, sizes).header()
    except FileNotFoundError as error:
        raise FileNotFoundError(f"GGUF file {str(path)!r} does not exist: give the path of one") from error
    except (_Damaged, OSError, ValueError, struct.error) as error:  # ValueError: of mmap for an empty file
        raise ValueError(f"{path} is damaged or not a GGUF file ({error}): fetch it again") from error


class _Damaged(Exception):
    """Why a file cannot be read."""


class _Reader:
    """Reads a file from its beginning on."""

    def __init__(self, data: mmap.mmap, path: Path, sizes: dict[int, tuple[int, int]]) -> None:
        self._data, self._path, self._sizes, self._at = data, path, sizes, 0

    def header(self) -> GGUFHeader:
        if self._bytes(4) != MAGIC:
            raise _Damaged("it does not begin with GGUF")
        version, num_tensors, num_keys = self._numbers("<IQQ")
        if version not in VERSIONS:
            raise _Damaged(f"its version is {version}, and versions 2 and 3 can be read, of little-endian machines")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._string()
            if name in metadata:
                raise _Damaged(f"{name[:80]!r} is there twice")
            metadata[name] = self._value(self._number("<I"))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Damaged(f"general.alignment is {alignment!r}")
        first = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorPlace] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise _Damaged(f"the tensor {name!r} is there twice")
            tensors[name] = self._place(name, shape, kind, first + offset)
        return GGUFHeader(self._path, metadata, tensors)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._number("<I")
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise _Damaged(f"the tensor {name[:80]!r} has {num_dimensions} dimensions")
        shape = tuple(reversed(self._numbers(f"<{num_dimensions}Q")))  # the file has the innermost first
        kind, offset = self._numbers("<IQ")
        return name, shape, kind, offset

    def _place(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> TensorPlace:
        if kind not in self._sizes:
            raise _Damaged(f"the tensor {name!r} has the type {kind}, which the installed package gguf does not know")
        entries, size = self._sizes[kind]
        if min(shape) < 1 or shape[-1] % entries:
            raise _Damaged(f"the tensor {name!r} has the shape {shape}, in blocks of {entries}")
        num_bytes = math.prod(shape) // entries * size
        if start + num_bytes > len(self._data):
            raise _Damaged(f"the tensor {name!r} ends at byte {start + num_bytes}, but the file has {len(self._data)}")
        return TensorPlace(name, shape, kind, start, num_bytes)

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _Damaged(f"there is no type {kind} of metadata")
        of, count = self._numbers("<IQ")
        if of in _NUMBERS:
            if count <= MAX_KEPT:
                return list(self._numbers(f"<{count}{_NUMBERS[of][1]}"))
            self._skip(count * struct.calcsize(_NUMBERS[of]))
            return None
        if of != _STRING:
            raise _Damaged(f"an array of metadata has entries of the type {of}")
        for _ in range(count):
            self._skip(self._number("<Q"))
        return None

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode()

    def _bytes(self, count: int) -> bytes:
        start = self._at
        self._skip(count)
        return self._data[start : self._at]

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise _Damaged(f"it ends at byte {len(self._data)}, within its header")
        self._at += count

    def _number(self, form: str) -> Any:
        return self._numbers(form)[0]

    def _numbers(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found


def _block_sizes() -> dict[int, tuple[int, int]]:
    """Return how many entries a block has, and how many bytes, by ggml's number of a type."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            f"GGUF files need the package gguf ({error}): run pip install 'vllm-blend[gguf]', or give the directory of "
            "the same model in safetensors"
        ) from error
    return {int(kind): (entries, size) for kind, (entries, size) in gguf.GGML_QUANT_SIZES.items()}
