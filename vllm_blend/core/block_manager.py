"""Blocks of the KV cache: their reference counts, and which full blocks can be found again by their content.

Every block has a reference count. A full block of exact prefill can be published under a digest chained over everything
before it; a later request with the same beginning takes it by reference. A published block that is not in use keeps its
content until the space is needed, least recently used first.

The blocks of a blended context are no exact prefix and are never published. They can be retained under a key of their
own, which names the whole context and how it was blended, and are found again all together or not at all.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vllm_blend.inputs import StoredPiece


class OutOfBlocks(RuntimeError):
    """The pool has fewer free blocks than were asked for; nothing was allocated."""


@dataclass(frozen=True)
class Published:
    """The content of a published block: the digest of its whole prefix, and its own tokens to verify a hit."""

    digest: bytes
    token_ids: tuple[int, ...]
    is_salted: bool = False  # whether only prompts with a certain cache_salt may share it


class PrefixListener(Protocol):
    """What is told of every change of the set of published blocks, in the order of the changes."""

    def stored(self, digest: bytes, parent: bytes | None, token_ids: Sequence[int], is_salted: bool) -> None:
        """Take note of a block that can be found from now on. `parent` is the digest of the block before it, None for
        the first one of a prefix."""
        ...

    def removed(self, digest: bytes, is_salted: bool) -> None:
        """Take note of a block that can no longer be found."""
        ...

    def cleared(self) -> None:
        """Take note that no block can be found any more."""
        ...


@dataclass(frozen=True)
class Retained:
    """The blocks of a blended context of `num_tokens` tokens. If the last block is not full, the request that computed
    it may have gone on there: others copy it before they write."""

    blocks: tuple[int, ...]
    num_tokens: int
    pieces: tuple[StoredPiece, ...] = ()


def chain_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the digest of a block's content in the context of everything before it (16 bytes, BLAKE2b).

    `parent` is the digest of the block before; of the first one it is the request's salt: 32 bytes, or b"" for none.
    """
    return hashlib.blake2b(np.asarray(token_ids, np.int64).tobytes(), digest_size=16, key=parent).digest()


class BlockManager:
    """Reference-counted blocks 1..num_blocks-1 (block 0 is never given out: block tables are padded with it)."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks}: at least 2 are needed, as block 0 is reserved for padding")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))  # next to be reused first
        self._published: dict[int, Published] = {}
        self._by_digest: dict[bytes, int] = {}
        self._retained: dict[bytes, Retained] = {}
        self._retained_by: dict[int, bytes] = {}  # block -> the key of what it belongs to
        self.listener: PrefixListener | None = None

    @property
    def num_free_blocks(self) -> int:
        """Return the number of blocks that are not in use, including those with cached content."""
        return len(self._free)

    @property
    def num_usable_blocks(self) -> int:
        """Return the number of blocks that requests can have."""
        return self.num_blocks - 1

    @property
    def usage(self) -> float:
        """Return the share of the blocks that requests hold, in 0..1."""
        return 1 - self.num_free_blocks / self.num_usable_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens fill."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks of undefined content, one reference each. Raises OutOfBlocks, having taken nothing."""
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks were asked for, {len(self._free)} of {self.num_usable_blocks} are free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            if block in self._published:
                self._withdraw(block)
            if block in self._retained_by:
                self.forget_retained(self._retained_by[block])
            self._references[block] = 1
            taken.append(block)
        return taken

    def take(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of `blocks`, to share their content."""
        for block in blocks:
            self._references[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of `blocks`; those without any left are free again.

        Later blocks of a prefix are reused before earlier ones: an evicted early block would make the later ones
        unreachable.
        """
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise RuntimeError(f"block {block} was released more often than it was taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._published and block not in self._retained_by:
                    self._free.move_to_end(block, last=False)  # nothing to lose: reuse it before cached content

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """Return how many blocks would be free if the one table that holds `blocks` released them."""
        return len(self._free) + sum(self._references[block] == 1 for block in blocks)

    def match_prefix(self, digests: Sequence[bytes], token_ids: Sequence[int]) -> list[int]:
        """Return the longest run of published blocks for a prompt's chained `digests`, one per full block, without
        taking them."""
        matched: list[int] = []
        for index, digest in enumerate(digests):
            block = self._by_digest.get(digest)
            start = index * self.block_size
            if block is None or self._published[block].token_ids != tuple(token_ids[start : start + self.block_size]):
                break
            matched.append(block)
        return matched

    def publish(
        self,
        block: int,
        digest: bytes,
        token_ids: Sequence[int],
        parent: bytes | None = None,
        is_salted: bool = False,
    ) -> None:
        """Make a full block findable. A second block with the same digest stays private. `parent` is the digest of the
        block before it, None for the first one."""
        if not self.enable_prefix_caching or digest in self._by_digest or block in self._published:
            return
        self._published[block] = Published(digest, tuple(token_ids), is_salted)
        self._by_digest[digest] = block
        if self.listener is not None:
            self.listener.stored(digest, parent, token_ids, is_salted)

    @property
    def published(self) -> Mapping[bytes, int]:
        """Return the published blocks, by digest."""
        return self._by_digest

    @property
    def retained(self) -> Mapping[bytes, Retained]:
        """Return the retained contexts, by key."""
        return self._retained

    def retain(self, key: bytes, retained: Retained) -> None:
        """Make the blocks of a blended context findable under a key. They are released like any others.

        If the key is in use, the blocks stay private."""
        if key not in self._retained and not any(block in self._retained_by for block in retained.blocks):
            self._retained[key] = retained
            self._retained_by.update(dict.fromkeys(retained.blocks, key))

    def find_retained(self, key: bytes) -> Retained | None:
        """Return what is retained under a key, without taking it; it counts as used now."""
        retained = self._retained.get(key)
        if retained is not None:
            for block in reversed(retained.blocks):
                if block in self._free:
                    self._free.move_to_end(block)
        return retained

    def forget_retained(self, key: bytes) -> int:
        """Stop retaining what this key names, and return how many of its blocks are not in use. Blocks in use stay
        with their owners."""
        retained = self._retained.pop(key, None)
        free = 0
        for block in () if retained is None else retained.blocks:
            del self._retained_by[block]
            if block in self._free:
                self._free.move_to_end(block, last=False)  # nothing to lose any more
                free += 1
        return free

    def reset_prefix_cache(self) -> None:
        """Forget all published and retained content. Blocks in use stay with their owners."""
        self._published.clear()
        self._by_digest.clear()
        for key in list(self._retained):
            self.forget_retained(key)
        if self.listener is not None:
            self.listener.cleared()

    def _withdraw(self, block: int) -> None:
        """Make a published block unfindable."""
        published = self._published.pop(block)
        del self._by_digest[published.digest]
        if self.listener is not None:
            self.listener.removed(published.digest, published.is_salted)
