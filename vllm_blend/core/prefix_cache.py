"""Share blocks of exact prefill between requests with the same beginning, by digests of their content."""

from __future__ import annotations

from vllm_blend.core.block_manager import BlockManager, chain_digest
from vllm_blend.request import Request


def find_prefix(blocks: BlockManager, request: Request) -> list[int]:
    """Return the published blocks that a request can begin with, without taking them."""
    limit = request.max_cached_tokens // blocks.block_size
    if not blocks.enable_prefix_caching or limit == 0:
        return []
    _extend_digests(request, limit, blocks.block_size)
    return blocks.match_prefix(request.block_digests[:limit], request.token_slice(0, limit * blocks.block_size))


def publish_blocks(blocks: BlockManager, request: Request, start: int, stop: int) -> None:
    """Publish the blocks of a request that the tokens at start .. stop - 1 have filled, if they are exact."""
    size = blocks.block_size
    first, full = start // size, stop // size
    if full == first or not request.exact or not blocks.enable_prefix_caching:
        return
    _extend_digests(request, full, size)
    for index in range(first, full):
        tokens = request.token_slice(index * size, (index + 1) * size)
        parent = request.block_digests[index - 1] if index else None
        blocks.publish(request.block_table[index], request.block_digests[index], tokens, parent, bool(request.salt))


def _extend_digests(request: Request, count: int, size: int) -> None:
    """Give a request the digests of its first `count` blocks."""
    for index in range(len(request.block_digests), count):
        parent = request.block_digests[index - 1] if index else request.salt
        request.block_digests.append(chain_digest(parent, request.token_slice(index * size, (index + 1) * size)))
