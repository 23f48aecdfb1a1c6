"""What a GGUF file has (version 2 and 3): its metadata, and where each tensor lies. Everything is checked against the
file's size before it is used, so a damaged file can neither be read beyond its end nor take memory that it has not."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32  # if the metadata name none
MAX_DIMENSIONS = 4
MAX_KEPT = 4096  # entries of an array of numbers that `metadata` has; longer ones are a vocabulary's
_STRING, _ARRAY = 8, 9
# The types of metadata of one size, as struct calls them.
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_PART = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


@dataclass(frozen=True)
class TensorPlace:
    """Where a tensor lies. `shape` is in torch's order; `kind` is ggml's number of its type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    num_bytes: int
    path: Path

    def entry(self, index: int) -> TensorPlace:
        """Return the place of one of the tensors that are stacked in this one."""
        size = self.num_bytes // self.shape[0]
        return replace(self, shape=self.shape[1:], start=self.start + index * size, num_bytes=size)


@dataclass(frozen=True)
class ArrayPlace:
    """Where an array of metadata lies. `kind` is GGUF's number of the type of its entries."""

    kind: int
    count: int
    start: int


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a file, or of the parts of one. Arrays of strings, and long ones of numbers, are in `arrays`
    instead of `metadata`: `read_array` reads them."""

    path: Path
    metadata: dict[str, Any] = field(repr=False)
    arrays: dict[str, ArrayPlace] = field(repr=False)
    tensors: dict[str, TensorPlace] = field(repr=False)


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model that is split, by the name of the first; of any other file, the file alone."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, _, count, suffix = match.groups()
    return [path.with_name(f"{stem}{number:05}-of-{count}{suffix}") for number in range(1, int(count) + 1)] or [path]


def read_header(path: Path) -> GGUFHeader:
    """Read the header of a file, and of its parts if it is split. Raises FileNotFoundError if there is no file, or a
    part is missing, ValueError naming the file if it is damaged, is not a GGUF file, or needs a package that is
    missing."""
    header, paths = _read_one(path), parts_of(path)
    count = header.metadata.get("split.count", 1)
    if count in (0, 1):
        return header
    if count != len(paths):
        raise ValueError(
            f"{path} is one of {count!r} parts of a file, so its name must end with -00001-of-{count!s:0>5}.gguf: "
            "give the files their names back, or join them (llama-gguf-split --merge)"
        )
    if path != paths[0]:
        raise ValueError(f"{path} is not the first part of its file: give {str(paths[0])!r}")
    tensors = dict(header.tensors)
    for number, part in enumerate(paths[1:], 1):
        found = _read_one(part)
        if found.metadata.get("split.no") != number or tensors.keys() & found.tensors.keys():
            raise ValueError(f"{part} is not part {number + 1} of {path.name}: fetch the parts again")
        tensors |= found.tensors
    return replace(header, tensors=tensors)


def read_array(header: GGUFHeader, name: str) -> list[Any] | None:
    """Return an array of the metadata, None if the file has none of this name. Raises ValueError if a string in it is
    no text."""
    place = header.arrays.get(name)
    if place is None:
        found = header.metadata.get(name)
        return found if isinstance(found, list) else None
    with _open(header.path) as data:
        return _Reader(data, header.path).entries(place)


class _Damaged(Exception):
    """Why a file cannot be read."""


@contextmanager
def _open(path: Path) -> Iterator[mmap.mmap]:
    """Map a file into memory, and name it in the errors of what reads it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except FileNotFoundError as error:
        raise FileNotFoundError(f"GGUF file {str(path)!r} does not exist: give the path of one") from error
    except (_Damaged, OSError, ValueError, struct.error) as error:  # ValueError: of mmap for an empty file
        raise ValueError(f"{path} is damaged or not a GGUF file ({error}): fetch it again") from error


def _read_one(path: Path) -> GGUFHeader:
    try:
        found = path.stat()
    except OSError:  # opening it says what is wrong
        return _read_unchanged(path, ())
    return _read_unchanged(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))


@lru_cache(maxsize=64)  # a model in parts has one for each
def _read_unchanged(path: Path, state: tuple[int, ...]) -> GGUFHeader:
    """Read the header of a file in some state: a vocabulary takes a while to pass over, and a model is loaded by
    several readers."""
    sizes = _block_sizes()
    with _open(path) as data:
        return _Reader(data, path).header(sizes)


class _Reader:
    """Reads a file from its beginning on."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0
        self._arrays: dict[str, ArrayPlace] = {}

    def header(self, sizes: dict[int, tuple[int, int]]) -> GGUFHeader:
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
            metadata[name] = self._value(name, self._number("<I"))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Damaged(f"general.alignment is {alignment!r}")
        first = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorPlace] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise _Damaged(f"the tensor {name!r} is there twice")
            tensors[name] = self._place(sizes, name, shape, kind, first + offset)
        return GGUFHeader(self._path, metadata, self._arrays, tensors)

    def entries(self, place: ArrayPlace) -> list[Any]:
        """Return the entries of an array, which has been skipped once."""
        if place.kind != _STRING:
            self._at = place.start
            return list(self._numbers(f"<{place.count}{_NUMBERS[place.kind][1]}"))
        return self._walk(place.start, place.count, keeps=True)

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dimensions = self._string(), self._number("<I")
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise _Damaged(f"the tensor {name[:80]!r} has {num_dimensions} dimensions")
        shape = tuple(reversed(self._numbers(f"<{num_dimensions}Q")))  # the file has the innermost first
        kind, offset = self._numbers("<IQ")
        return name, shape, kind, offset

    def _place(
        self, sizes: dict[int, tuple[int, int]], name: str, shape: tuple[int, ...], kind: int, start: int
    ) -> TensorPlace:
        if kind not in sizes:
            raise _Damaged(f"the tensor {name!r} has the type {kind}, which the installed package gguf does not know")
        entries, size = sizes[kind]
        if min(shape) < 1 or shape[-1] % entries:
            raise _Damaged(f"the tensor {name!r} has the shape {shape}, in blocks of {entries}")
        num_bytes = math.prod(shape) // entries * size
        if start + num_bytes > len(self._data):
            raise _Damaged(f"the tensor {name!r} ends at byte {start + num_bytes}, but the file has {len(self._data)}")
        return TensorPlace(name, shape, kind, start, num_bytes, self._path)

    def _value(self, name: str, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise _Damaged(f"there is no type {kind} of metadata")
        of, count = self._numbers("<IQ")
        if of in _NUMBERS and count <= MAX_KEPT:
            return list(self._numbers(f"<{count}{_NUMBERS[of][1]}"))
        self._arrays[name] = ArrayPlace(of, count, self._at)
        if of in _NUMBERS:
            self._skip(count * struct.calcsize(_NUMBERS[of]))
        elif of == _STRING:
            self._walk(self._at, count)
        else:
            raise _Damaged(f"an array of metadata has entries of the type {of}")
        return None

    def _walk(self, start: int, count: int, keeps: bool = False) -> list[str]:
        """Go over an array of strings, and return them if they are to be kept. Vocabularies are long: this is a tight
        loop."""
        found: list[str] = []
        data, length_at, end = self._data, struct.Struct("<Q").unpack_from, len(self._data)
        for _ in range(count):
            begin = start + 8
            start = begin + length_at(data, start)[0]
            if start > end:
                raise _Damaged(f"it ends at byte {end}, within its header")
            if keeps:
                found.append(data[begin:start].decode())
        self._at = start
        return found

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
