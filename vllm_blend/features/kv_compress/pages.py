"""Head pages: pages of the KV cache that hold KVs of one head of one layer, cut out of ordinary blocks.

A block holds `block_size` tokens of all KV heads of all layers. It can be cut into layers * KV heads head pages, each
for `block_size` KVs of any one head of any layer of any request (KV-Compress, Rehg 2024: with a page per head, heads
can keep different numbers of KVs and still free memory). Head page p = (layer * num_blocks + block) * kv_heads + j is
the j-th part of `key[layer, block]`, which is contiguous.
"""

from __future__ import annotations

import numpy as np

from vllm_blend.core.block_manager import BlockManager, OutOfBlocks

SHARED = -1  # the owner of pages that belong to no request in particular


class HeadPagePool:
    """Head pages cut out of the free blocks of a `BlockManager`; a block is returned when all its pages are free again.

    Page numbers are int32. Pages of block 0 are never allocated: tables are padded with page 0, and writes of padding
    rows go to slot 0.

    Pages are allocated for an owner, a small integer. As long as there are free blocks, each owner has blocks of its
    own, so it returns whole blocks when it ends: if pages of many requests were mixed, the end of one would leave holes
    everywhere, and no block for the next prompt.
    """

    def __init__(self, blocks: BlockManager, num_layers: int, num_kv_heads: int) -> None:
        if num_layers < 1 or num_kv_heads < 1:
            raise ValueError(f"num_layers={num_layers}, num_kv_heads={num_kv_heads}: both must be at least 1")
        self.blocks = blocks
        self.pages_per_block = num_layers * num_kv_heads
        self.num_pages = blocks.num_blocks * self.pages_per_block
        if self.num_pages > np.iinfo(np.int32).max:
            raise ValueError(
                f"{blocks.num_blocks} blocks of {self.pages_per_block} head pages are more than int32 tables can "
                "number: raise block_size or lower num_gpu_blocks_override"
            )
        self._kv_heads, self._num_blocks = num_kv_heads, blocks.num_blocks
        part = np.arange(self.pages_per_block)
        self._page_of_part = (
            part // num_kv_heads * (self._num_blocks * num_kv_heads) + part % num_kv_heads
        )  # in block 0
        self._is_used = np.zeros((self._num_blocks, self.pages_per_block), np.bool_)
        self._num_used_in = np.zeros(self._num_blocks, np.int64)  # by block
        self._has_free = np.zeros(self._num_blocks, np.bool_)  # cut, and not all in use
        self._owner = np.full(self._num_blocks, SHARED, np.int64)
        self._stamp = np.zeros(self.num_pages, np.int32)  # scratch space: finds repeated pages without sorting
        self.num_cut_blocks = self.num_used_pages = 0  # blocks taken from the `BlockManager`, and pages in use

    @property
    def num_free_pages(self) -> int:
        """Return how many pages can be allocated: the free pages of cut blocks, and those of all free blocks."""
        return (self.num_cut_blocks + self.blocks.num_free_blocks) * self.pages_per_block - self.num_used_pages

    def allocate(self, count: int, owner: int = SHARED) -> np.ndarray:
        """Take `count` pages of undefined content, [count] int32. Raises OutOfBlocks, having taken nothing.

        They come from blocks cut for this owner, the fullest first; then from free blocks; then from blocks cut for
        others, the fullest first.
        """
        return self.allocate_each(np.array([count]), np.array([owner]))

    def allocate_each(self, counts: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """Take counts[i] pages for each of the distinct owners[i], as `allocate` does, and return them in that order.
        Raises OutOfBlocks, having taken nothing."""
        total = int(counts.sum())
        if total > self.num_free_pages:
            raise OutOfBlocks(
                f"{total} head pages were asked for, {self.num_free_pages} of "
                f"{self.blocks.num_usable_blocks * self.pages_per_block} are free"
            )
        wanted = counts.astype(np.int64)
        parts = [self._take(*self._own_blocks(owners), wanted)]
        if wanted.any():
            parts.append(self._take(*self._cut_blocks(owners, wanted), wanted))
        if wanted.any():  # no block is free any more
            left = self._fullest_first(np.flatnonzero(self._has_free))
            pages, _ = self._take(left, np.zeros(len(left), np.int64), wanted.sum(keepdims=True))
            parts.append((pages, np.repeat(np.arange(len(owners)), wanted)))
        self.num_used_pages += total
        if len(parts) == 1:
            return parts[0][0]
        pages, whose = (np.concatenate(part) for part in zip(*parts, strict=True))
        return pages[np.argsort(whose, kind="stable")]

    def release(self, pages: np.ndarray) -> None:
        """Free pages; blocks without any page in use are returned to the `BlockManager` at once.

        Raises RuntimeError for pages that are free, or named twice, having changed nothing.
        """
        pages = pages.astype(np.int64)
        blocks, parts = self._locate(pages)
        if not self._is_used[blocks, parts].all():
            wrong = pages[~self._is_used[blocks, parts]]
            raise RuntimeError(f"head page {wrong[0]} was released, but it is free")
        stamps = np.arange(len(pages), dtype=np.int32)
        self._stamp[pages] = stamps
        if not np.array_equal(self._stamp[pages], stamps):
            raise RuntimeError(f"head page {pages[self._stamp[pages] != stamps][0]} was released twice at once")
        self._is_used[blocks, parts] = False
        counts = np.bincount(blocks)
        touched = np.flatnonzero(counts)
        self._num_used_in[touched] -= counts[touched]
        self.num_used_pages -= len(pages)
        empty = touched[self._num_used_in[touched] == 0]
        self._has_free[touched] = True
        self._has_free[empty] = False
        self.num_cut_blocks -= len(empty)
        self.blocks.release(empty.tolist())

    def _locate(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks of pages, and which parts of their blocks they are."""
        if len(pages) and (pages.min() < 0 or pages.max() >= self.num_pages):
            raise RuntimeError(
                f"head pages {pages.min()} to {pages.max()} were named, but there are only 0 to {self.num_pages - 1}"
            )
        row, head = np.divmod(pages, self._kv_heads)
        layer, block = np.divmod(row, self._num_blocks)
        return block, layer * self._kv_heads + head

    def _fullest_first(self, blocks: np.ndarray) -> np.ndarray:
        return blocks[np.argsort(-self._num_used_in[blocks], kind="stable")]

    def _own_blocks(self, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return blocks with free pages that were cut for one of the owners, and whose each is: ordered by owner, then
        fullest first."""
        blocks = np.flatnonzero(self._has_free)
        whose_block = self._owner[blocks]
        if len(owners) == 1:
            blocks = self._fullest_first(blocks[whose_block == owners[0]])
            return blocks, np.zeros(len(blocks), np.int64)
        place = np.full(max(int(owners.max(initial=0)), int(whose_block.max(initial=0))) + 2, -1, np.int64)
        place[owners] = np.arange(len(owners))  # SHARED, -1, is the last
        whose = place[whose_block]
        blocks, whose = blocks[whose >= 0], whose[whose >= 0]
        order = np.lexsort((-self._num_used_in[blocks], whose))
        return blocks[order], whose[order]

    def _cut_blocks(self, owners: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Cut free blocks, if there are any, for the pages that the owners want; return them and whose each is."""
        whose = np.repeat(np.arange(len(owners)), -(-wanted // self.pages_per_block))[: self.blocks.num_free_blocks]
        blocks = np.array(self.blocks.allocate(len(whose)), np.int64)
        self._has_free[blocks] = True
        self._owner[blocks] = owners[whose]
        self.num_cut_blocks += len(blocks)
        return blocks, whose

    def _take(self, blocks: np.ndarray, whose: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take up to wanted[w] free pages from the blocks whose owner is w, in order, and count `wanted` down; `whose`
        is ascending. Return the pages, and whose each is."""
        free = self.pages_per_block - self._num_used_in[blocks]
        before = np.cumsum(free) - free
        before -= before[np.searchsorted(whose, whose)]  # among the blocks of the same owner
        needed = before < wanted[whose]
        blocks, whose, free, before = blocks[needed], whose[needed], free[needed], before[needed]
        row, part = np.nonzero(~self._is_used[blocks])
        rank = np.arange(len(row)) + (before - (np.cumsum(free) - free))[row]
        taken = rank < wanted[whose[row]]
        row, part = row[taken], part[taken]
        taken_from = blocks[row]
        self._is_used[taken_from, part] = True
        self._num_used_in[blocks] += np.bincount(row, minlength=len(blocks))
        self._has_free[blocks] = self._num_used_in[blocks] < self.pages_per_block
        wanted -= np.bincount(whose[row], minlength=len(wanted))
        return (self._page_of_part[part] + taken_from * self._kv_heads).astype(np.int32), whose[row]
