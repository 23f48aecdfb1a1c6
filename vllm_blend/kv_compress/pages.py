"""Head pages: pages of the KV cache that hold one KV head of one layer, cut out of ordinary blocks.

A block holds `block_size` tokens of all KV heads of all layers. Cut up it yields layers * KV heads head pages, each of
`block_size` KVs of any one head of any layer of any request (KV-Compress, Rehg 2024: a page per head is what lets heads
keep different numbers of KVs and still free memory). Head page p = (layer * num_blocks + block) * kv_heads + j is the
j-th part of `key[layer, block]`, which is contiguous.
"""

from __future__ import annotations

import numpy as np

from vllm_blend.core.block_manager import BlockManager, OutOfBlocks

SHARED = -1  # the owner of pages that are nobody's in particular


class HeadPagePool:
    """Head pages cut out of the free blocks of a `BlockManager`; a block goes back when all its pages are free again.

    Page numbers are int32. Pages of block 0 are never given out: tables are padded with page 0, and slot 0 takes what
    nobody reads.

    Pages are allocated for an owner, a small integer. Owners keep to blocks of their own as long as there are free
    blocks, so what one releases at its end goes back as whole blocks: were pages of many requests mixed, the end of one
    would leave holes everywhere, and no block for the next prompt.
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
        self._given = np.zeros((self._num_blocks, self.pages_per_block), np.bool_)
        self._num_given = np.zeros(self._num_blocks, np.int64)  # by block
        self._has_room = np.zeros(self._num_blocks, np.bool_)  # cut, and not all given
        self._owner = np.full(self._num_blocks, SHARED, np.int64)
        self._stamp = np.zeros(self.num_pages, np.int32)  # scratch space: finds repeated pages without sorting
        self._num_cut = self._num_used = 0

    @property
    def num_used_pages(self) -> int:
        """Pages given out."""
        return self._num_used

    @property
    def num_cut_blocks(self) -> int:
        """Blocks borrowed from the `BlockManager`."""
        return self._num_cut

    @property
    def num_free_pages(self) -> int:
        """How many pages `allocate` can give: the free pages of blocks already cut, and those of all free blocks."""
        return (self._num_cut + self.blocks.num_free_blocks) * self.pages_per_block - self._num_used

    def allocate(self, count: int, owner: int = SHARED) -> np.ndarray:
        """`count` pages of undefined content, [count] int32. Raises OutOfBlocks, having taken nothing.

        They come from blocks cut for this owner, the fullest first; then from free blocks; then from blocks cut for
        others, the fullest first.
        """
        return self.allocate_each(np.array([count]), np.array([owner]))

    def allocate_each(self, counts: np.ndarray, owners: np.ndarray) -> np.ndarray:
        """`allocate` of counts[i] pages for each of the distinct owners[i], or of none: all pages, in that order."""
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
        if wanted.any():  # there is no free block any more
            left = self._fullest_first(np.flatnonzero(self._has_room))
            pages, _ = self._take(left, np.zeros(len(left), np.int64), wanted.sum(keepdims=True))
            parts.append((pages, np.repeat(np.arange(len(owners)), wanted)))
        self._num_used += total
        if len(parts) == 1:
            return parts[0][0]
        pages, whose = (np.concatenate(part) for part in zip(*parts, strict=True))
        return pages[np.argsort(whose, kind="stable")]

    def release(self, pages: np.ndarray) -> None:
        """Take pages back; blocks of which no page is given out any more go back to the `BlockManager` at once.

        Raises RuntimeError for pages that are not given out, or named twice, having changed nothing.
        """
        pages = pages.astype(np.int64)
        blocks, parts = self._places(pages)
        if not self._given[blocks, parts].all():
            wrong = pages[~self._given[blocks, parts]]
            raise RuntimeError(f"head page {wrong[0]} was released, but nobody has it")
        stamps = np.arange(len(pages), dtype=np.int32)
        self._stamp[pages] = stamps
        if not np.array_equal(self._stamp[pages], stamps):
            raise RuntimeError(f"head page {pages[self._stamp[pages] != stamps][0]} was released twice at once")
        self._given[blocks, parts] = False
        counts = np.bincount(blocks)
        touched = np.flatnonzero(counts)
        self._num_given[touched] -= counts[touched]
        self._num_used -= len(pages)
        empty = touched[self._num_given[touched] == 0]
        self._has_room[touched] = True
        self._has_room[empty] = False
        self._num_cut -= len(empty)
        self.blocks.release(empty.tolist())

    def _places(self, pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The blocks of pages, and which parts of their blocks they are."""
        if len(pages) and (pages.min() < 0 or pages.max() >= self.num_pages):
            raise RuntimeError(
                f"there are no head pages {pages.min()} to {pages.max()}: they go to {self.num_pages - 1}"
            )
        row, head = np.divmod(pages, self._kv_heads)
        layer, block = np.divmod(row, self._num_blocks)
        return block, layer * self._kv_heads + head

    def _fullest_first(self, blocks: np.ndarray) -> np.ndarray:
        return blocks[np.argsort(-self._num_given[blocks], kind="stable")]

    def _own_blocks(self, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Blocks with free pages that were cut for one of the owners, and which one: ordered by that, then fullest
        first."""
        blocks = np.flatnonzero(self._has_room)
        whose_block = self._owner[blocks]
        if len(owners) == 1:
            blocks = self._fullest_first(blocks[whose_block == owners[0]])
            return blocks, np.zeros(len(blocks), np.int64)
        place = np.full(max(int(owners.max(initial=0)), int(whose_block.max(initial=0))) + 2, -1, np.int64)
        place[owners] = np.arange(len(owners))  # SHARED, -1, is the last
        whose = place[whose_block]
        blocks, whose = blocks[whose >= 0], whose[whose >= 0]
        order = np.lexsort((-self._num_given[blocks], whose))
        return blocks[order], whose[order]

    def _cut_blocks(self, owners: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Free blocks cut for the owners, to hold the pages they want as far as there are any; and whose each is."""
        whose = np.repeat(np.arange(len(owners)), -(-wanted // self.pages_per_block))[: self.blocks.num_free_blocks]
        blocks = np.array(self.blocks.allocate(len(whose)), np.int64)
        self._has_room[blocks] = True
        self._owner[blocks] = owners[whose]
        self._num_cut += len(blocks)
        return blocks, whose

    def _take(self, blocks: np.ndarray, whose: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Give out up to wanted[w] free pages of the blocks whose is w, in order, and count `wanted` down; `whose` is
        ascending. The pages, and whose they are."""
        free = self.pages_per_block - self._num_given[blocks]
        before = np.cumsum(free) - free
        before -= before[np.searchsorted(whose, whose)]  # among the blocks of the same owner
        needed = before < wanted[whose]
        blocks, whose, free, before = blocks[needed], whose[needed], free[needed], before[needed]
        row, part = np.nonzero(~self._given[blocks])
        rank = np.arange(len(row)) + (before - (np.cumsum(free) - free))[row]
        taken = rank < wanted[whose[row]]
        row, part = row[taken], part[taken]
        taken_from = blocks[row]
        self._given[taken_from, part] = True
        self._num_given[blocks] += np.bincount(row, minlength=len(blocks))
        self._has_room[blocks] = self._num_given[blocks] < self.pages_per_block
        wanted -= np.bincount(whose[row], minlength=len(wanted))
        return (self._page_of_part[part] + taken_from * self._kv_heads).astype(np.int32), whose[row]
