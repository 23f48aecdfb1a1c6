"""Reading one plain tensor from the bytes of a `.pt` file, which is not trusted.

`torch.load(weights_only=True)` runs no code, but it believes the file: a storage may be said to be larger than its
bytes, a record may unpack to any size, and what comes out may be sparse, quantized or without any data. So the file is
only taken for what `torch.save` writes for one dense tensor: the pickle is read with nothing to call but the names that
this needs, which describe the tensor, and the numbers are taken from the file when the description fits them.
"""

from __future__ import annotations

import io
import pickle
import sys
import zipfile
from dataclasses import dataclass
from typing import Any

import torch

from vllm_blend.checks import a_type

MAX_PICKLE = 1 << 16  # bytes; a tensor's own takes some 200
OVERHEAD = 1 << 16  # bytes that a file has besides its numbers, at most

_STORAGES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
}


class BadTensorFile(ValueError):
    """The bytes are not one dense tensor as torch.save writes it."""


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype
    record: str
    count: int


@dataclass(frozen=True)
class _Described:
    storage: Any
    offset: Any
    size: Any
    stride: Any


class _Describer(pickle._Unpickler):  # in Python: the one in C allocates memory for any memo number it reads
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _describe
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("collections", "OrderedDict"):  # of hooks, which there are none of
            return dict
        raise BadTensorFile(f"it names {module}.{name}, which no plain tensor needs")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, record, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype) or not isinstance(record, str):
            raise BadTensorFile(f"its storage is {pid!r}")
        return _Storage(dtype, record, _number(count))


def _describe(storage: object, offset: object, size: object, stride: object, *_: object) -> _Described:
    """Stand in for the function of torch that makes a tensor of its storage."""
    return _Described(storage, offset, size, stride)


def read_tensor(data: bytes) -> torch.Tensor:
    """Return the tensor, in memory of its own. Raises BadTensorFile."""
    try:
        return _read(data)
    except BadTensorFile:
        raise
    except Exception as error:  # bytes of any kind make zipfile and pickle raise nearly anything
        raise BadTensorFile(f"it is not what torch.save writes ({type(error).__name__}: {error})") from error


def _read(data: bytes) -> torch.Tensor:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE:
            raise BadTensorFile(f"it has {len(pickles)} pickles, of {[info.file_size for info in pickles]} bytes")
        root = pickles[0].filename.removesuffix("data.pkl")
        tensor = _Describer(io.BytesIO(_record(archive, pickles[0].filename))).load()
        if not isinstance(tensor, _Described) or not isinstance(tensor.storage, _Storage):
            raise BadTensorFile(f"it holds {a_type(tensor)}, not a plain tensor")
        if f"{root}byteorder" in archive.namelist():
            order = _record(archive, f"{root}byteorder")
            if order != sys.byteorder.encode():
                raise BadTensorFile(f"its numbers are {order[:9]!r}, and this machine is {sys.byteorder} endian")
        numbers = _record(archive, f"{root}data/{tensor.storage.record}")
    size, dtype = [_number(length) for length in tensor.size], tensor.storage.dtype
    count, strides = 1, list[int]()
    for length in reversed(size):
        strides.insert(0, count)
        count *= length
    bare = count == tensor.storage.count and _number(tensor.offset) == 0
    dense = all(ours == theirs for ours, theirs, n in zip(strides, tensor.stride, size, strict=True) if n > 1)
    if not bare or not (dense or count == 0) or len(numbers) != count * dtype.itemsize:
        raise BadTensorFile(
            f"it says {dtype} {size} with strides {list(tensor.stride)}, and has {len(numbers)} bytes of numbers"
        )
    if count == 0:
        return torch.empty(size, dtype=dtype)
    return torch.frombuffer(bytearray(numbers), dtype=dtype).view(size)


def _record(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED:  # what is not packed is never more than the file has
        raise BadTensorFile(f"its {name} is packed, to {info.compress_size} bytes of {info.file_size}")
    return archive.read(info)


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise BadTensorFile(f"{value!r} is not a size")
    return value
