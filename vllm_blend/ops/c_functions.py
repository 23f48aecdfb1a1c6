"""Calls of C functions that a type checker can check: every pointer has the type of what it points to.

The functions of a library are declared once, as the methods of a Protocol whose parameters are those of the C function,
in order; a structure is a `ctypes.Structure` with annotated fields. `bind` and `fields_of` make the ctypes prototypes
from these annotations, and a test compares them with the C headers. No two pointers of a function have one type (see
`pointers`), so a call with two of them swapped does not type-check.

Calls pass bare integers to bare ctypes functions, as unchecked ones would: a call with eleven arguments takes 1.3 us on
a Xeon. Keyword arguments would make that 1.9, torch.library's dispatcher alone takes 5, and tvm-ffi would be one more
package for an installation on a CPU.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, NewType, TypeAlias

from vllm_blend.ops.pointers import ROLES

Int: TypeAlias = int
Int32: TypeAlias = int
Int64: TypeAlias = int
Size: TypeAlias = int
Float: TypeAlias = float
Stream: TypeAlias = int  # a cudaStream_t

Arguments = NewType("Arguments", int)  # the address of a structure of arguments
Cache = NewType("Cache", int)  # the address of a `cuda_library.CacheView`
Pieces = NewType("Pieces", int)  # the address of a table on the host, see vb_copy_pieces

_NUMBERS: dict[str, Any] = {
    "Int": ctypes.c_int,
    "Int32": ctypes.c_int32,
    "Int64": ctypes.c_int64,
    "Size": ctypes.c_size_t,
    "Float": ctypes.c_float,
}
_POINTERS = ROLES | {"Arguments", "Cache", "Pieces", "Stream"}


def c_type(annotation: str) -> Any:
    """Return the ctypes type of a parameter or field that is annotated so."""
    if annotation in _NUMBERS:
        return _NUMBERS[annotation]
    if annotation.removesuffix(" | None").removeprefix("to.") in _POINTERS:
        return ctypes.c_void_p
    raise TypeError(f"{annotation!r} is neither a number of c_functions nor a role of pointers")


def fields_of(annotations: dict[str, str]) -> list[tuple[str, Any]]:
    """Return the `_fields_` of a structure with these annotations; called in its body, after them."""
    return [(name, c_type(annotation)) for name, annotation in annotations.items()]


def prototypes(declared: type) -> dict[str, tuple[list[Any], Any]]:
    """Return the ctypes types of the arguments and the result of each function that a Protocol declares."""
    found = {}
    for name, method in vars(declared).items():
        if callable(method) and not name.startswith("_"):
            *arguments, result = method.__annotations__.values()
            found[name] = ([c_type(annotation) for annotation in arguments], c_type(result))
    return found


def bind(declared: type, library: ctypes.CDLL, prefix: str, **facts: Any) -> Any:
    """Return the library's functions as the Protocol `declared` has them, with `facts` for its other attributes.

    In the library, `prefix` is before their names. Raises AttributeError for a function that it does not have.
    """
    functions = {}
    for name, (arguments, result) in prototypes(declared).items():
        functions[name] = function = getattr(library, prefix + name)
        function.argtypes, function.restype = arguments, result
    return SimpleNamespace(**functions, **facts)
