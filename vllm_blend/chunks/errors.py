"""What can be wrong with chunks. All are ValueErrors but running out of memory."""

from __future__ import annotations


class UnknownChunkError(ValueError):
    """No chunk has this id or name, or it has been deleted."""


class ChunkInUseError(ValueError):
    """A chunk is pinned, so it cannot be deleted."""


class OutOfChunkMemoryError(RuntimeError):
    """A chunk does not fit into the chunk store, although everything that may leave has left."""
