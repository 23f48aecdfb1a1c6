"""The order "free": chunks stand in the order of the relevance that a prompt's scores give them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from vllm_blend.chunk_options import ChunkOptions
from vllm_blend.inputs import ParsedPrompt

RANK_OFFSET = 60  # of reciprocal rank fusion: how little the first ranks stand out


def order_by_relevance(parsed: ParsedPrompt) -> ParsedPrompt:
    """Return a prompt with its most relevant pages first, by its `relevance`.

    Chunks that `continues` links are a page: they stay together in their order, and a page is as relevant as its best
    chunk. Several signals are fused by reciprocal rank (Cormack et al., SIGIR 2009). Equal pages keep their order.
    """
    if (ordered := parsed.ordered) is not None:
        own = ("blend_selector", "blend_recompute_ratio", "salt", "order", "retention", "retain")  # of the request
        return replace(ordered, text=None, **{name: getattr(parsed, name) for name in own})
    order = relevance_order(len(parsed.chunk_bounds), parsed.relevance, parsed.continues)
    return reorder_chunks(parsed, order)


def relevance_order(
    num_chunks: int, relevance: Sequence[Sequence[float]], continues: Sequence[int | None]
) -> list[int]:
    """Return the numbers of chunks in the order of their relevance, as `order_by_relevance` says."""
    pages = group_pages(num_chunks, continues)
    scores = fuse([[max(signal[index] for index in page) for page in pages] for signal in relevance])
    ranked = sorted(range(len(pages)), key=scores.__getitem__, reverse=True)
    return [index for page in ranked for index in pages[page]]


def group_pages(num_chunks: int, continues: Sequence[int | None]) -> list[list[int]]:
    """Return the chunks of each page, ascending, and the pages in the order of their first chunks. `continues` has, for
    each chunk, an earlier one that it continues, or None; if it is empty, each chunk is a page."""
    pages: list[list[int]] = []
    page_of: list[list[int]] = []
    for index in range(num_chunks):
        before = continues[index] if continues else None
        page: list[int] = [] if before is None else page_of[before]
        if before is None:
            pages.append(page)
        page.append(index)
        page_of.append(page)
    return pages


def fuse(signals: Sequence[Sequence[float]]) -> list[float]:
    """Return the reciprocal rank fusion of several scores of the same pages. Equal scores have the same rank."""
    fused = [0.0] * len(signals[0])
    for scores in signals:
        descending = sorted(scores, reverse=True)
        for index, score in enumerate(scores):
            fused[index] += 1 / (RANK_OFFSET + 1 + descending.index(score))
    return fused


def reorder_chunks(parsed: ParsedPrompt, order: Sequence[int]) -> ParsedPrompt:
    """Return a prompt with its chunks, which must follow one another, in another order: `order` has their numbers. A
    chunk must not come before one that it `continues`."""
    said = ChunkOptions(**{each.name: getattr(parsed, each.name) for each in fields(ChunkOptions)})
    start, stop = parsed.chunk_bounds[0][0], parsed.chunk_bounds[-1][1]
    token_ids, bounds = parsed.token_ids[:start], []
    for index in order:
        first, last = parsed.chunk_bounds[index]
        bounds.append((len(token_ids), len(token_ids) + last - first))
        token_ids += parsed.token_ids[first:last]
    return replace(
        parsed,
        token_ids=token_ids + parsed.token_ids[stop:],
        text=None,
        chunk_bounds=tuple(bounds),
        **vars(said.reordered(order)),
        retention=tuple(parsed.retention[index] for index in order) if parsed.retention else (),
    )
