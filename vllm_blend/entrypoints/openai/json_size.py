"""How many values a JSON text has: what parsing it costs, and it cannot be interrupted, so that is known before."""

from __future__ import annotations

from collections import Counter

import numpy as np

from vllm_blend.entrypoints.openai.errors import APIError

MAX_VALUES = 1 << 20  # numbers, strings and others: parsing so many takes some 50 to 150 ms
MAX_OBJECTS = 1 << 17  # objects, lists and keys, each of which takes ten times as long
_SLICE_BYTES = 1 << 18


def check_size(body: bytes) -> None:
    """Raise APIError (413) for a JSON text of more values, or more objects, than one body may have.

    Other threads get their turn after every slice. Text is not looked into: any length of it is parsed quickly.
    """
    if len(body) <= 2 * MAX_OBJECTS:  # a value takes two bytes at least
        return
    found = count_outside_strings(body)
    objects = found["{"] + found["["] + found[":"]
    for count, limit, kind in ((found[","], MAX_VALUES, "values"), (objects, MAX_OBJECTS, "objects, lists and keys")):
        if count > limit:
            raise APIError(
                413,
                f"the body has more than {limit} {kind}: send them in several requests",
                code="body_too_large",
            )


def count_outside_strings(body: bytes) -> Counter[str]:
    """Count the characters of JSON's punctuation that are not inside of strings."""
    found: Counter[str] = Counter()
    start, num_quotes = 0, 0
    while start < len(body):
        piece = body[start : start + _SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # what it escapes belongs to it
            piece = body[start : start + _SLICE_BYTES + 1]
        start += len(piece)
        if b"\\" in piece:
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
        characters = np.frombuffer(piece, np.uint8)
        quotes = np.cumsum(characters == ord('"'), dtype=np.int64) + num_quotes
        outside = characters[quotes % 2 == 0].tobytes()
        for sign in ",:[{":
            found[sign] += outside.count(sign.encode())
        num_quotes = int(quotes[-1]) if len(quotes) else num_quotes
    return found
