"""Pages of the KV cache that hold chunks: those that a chunk is computed in, and those of retained contexts.

A chunk's stored KV has no pages: it lies in the chunk store, before RoPE, and positions belong to a composition. A
chunk has pages while it is computed, and in every blended composition whose pages are retained.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllm_blend.core.block_manager import BlockManager, OutOfBlocks


class PageManager:
    """A view of a `BlockManager` by chunk: pages are its blocks, and there is no other pool."""

    def __init__(self, blocks: BlockManager) -> None:
        self.blocks = blocks
        self._computing: dict[str, list[int]] = {}

    @property
    def chunk_page_tables(self) -> Mapping[str, list[tuple[int, ...]]]:
        """Return the page tables of every chunk that has any, by chunk id: the pages that it is computed in, then one
        table for each retained composition, with the pages that hold at least one of its tokens there."""
        tables = {chunk_id: [tuple(table)] for chunk_id, table in self._computing.items()}
        size = self.blocks.block_size
        for retained in self.blocks.retained.values():
            for piece in retained.pieces:
                pages = retained.blocks[piece.start // size : -(-piece.stop // size)]
                tables.setdefault(piece.id.key, []).append(pages)
        return tables

    def allocate_for_chunk(self, chunk_id: str, num_tokens: int) -> list[int]:
        """Take pages to compute a chunk in, with what stands before it. Retained and cached content gives way, least
        recently used first. Raises OutOfBlocks with the numbers, having taken nothing."""
        if chunk_id in self._computing:
            raise RuntimeError(f"chunk {chunk_id} is being computed already")
        needed = self.blocks.blocks_for(num_tokens)
        if needed > self.blocks.num_free_blocks:
            raise OutOfBlocks(
                f"chunk {chunk_id} needs {needed} pages of {self.blocks.block_size} tokens to be computed in, but "
                f"{self.blocks.num_free_blocks} of {self.blocks.num_usable_blocks} are free: let running requests "
                "finish, or raise num_gpu_blocks_override or gpu_memory_utilization"
            )
        table = self._computing[chunk_id] = self.blocks.allocate(needed)
        return list(table)

    def release_computed(self, chunk_id: str) -> None:
        """Return the pages that a chunk was computed in; those of retained compositions stay."""
        self.blocks.release(self._computing.pop(chunk_id, []))

    def free_for_chunk(self, chunk_id: str) -> int:
        """Return every page that is held for a chunk, and how many are not in use any more. Compositions that it stands
        in are not found any more; a request that runs in their pages keeps them to its end."""
        pages = len(self._computing.get(chunk_id, ()))
        self.release_computed(chunk_id)
        holding = [
            key
            for key, retained in self.blocks.retained.items()
            if any(piece.id.key == chunk_id for piece in retained.pieces)
        ]
        return pages + sum(self.blocks.forget_retained(key) for key in holding)
