"""A prompt made of chunks: which tokens stand where, and how what is stored of them is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from vllm_blend.chunks.chunk import Chunk
from vllm_blend.inputs import ParsedPrompt, StoredPiece

Mode = Literal["blend", "reuse", "exact"]
Role = Literal["template", "system", "context", "query"]


@dataclass(frozen=True)
class Part:
    """Some tokens of a composition: those of a chunk, a question, or what stands between them. `placed` is the chunk as
    it is here, if its text has other tokens here than by itself: its KV is stored under a key of its own."""

    token_ids: tuple[int, ...]
    role: Role
    chunk: Chunk | None = None
    placed: Chunk | None = None

    def __post_init__(self) -> None:
        if self.stored is not None and self.token_ids != self.stored.token_ids:
            raise ValueError(
                f"the part has {len(self.token_ids)} token ids that are not those of its chunk {self.stored.id!r}, but "
                "the chunk's KV would stand for them: use its token_ids"
            )

    @property
    def stored(self) -> Chunk | None:
        """Return the chunk whose KV stands for these tokens."""
        return self.placed or self.chunk

    def __repr__(self) -> str:
        return f"Part({self.role}, {len(self.token_ids)} tokens{'' if self.chunk is None else f', {self.chunk!r}'})"


@dataclass(frozen=True)
class PlacedPart:
    """A part and the positions that it takes: start .. stop - 1."""

    part: Part
    start: int
    stop: int


@dataclass(frozen=True)
class ChunkComposition:
    """Parts in their order; everything after the last chunk with KV is the question, which is always computed.

    mode "blend" computes the tokens again that the engine's rule chooses (`selector` and `recompute_ratio` override
    it), "reuse" none, "exact" all: it is the plain prompt of these tokens, and only exact prefixes are reused. With
    `retain` the pages of a blended context are kept for other compositions that differ in nothing but the question;
    None retains unless the rule chooses by the question. `salt` stands for a `cache_salt` (keys.salt_digest): every
    chunk was registered with it, and pages are shared with compositions that have it too.
    """

    parts: tuple[Part, ...]
    mode: Mode = "blend"
    selector: str | None = None
    recompute_ratio: float | None = None
    retain: bool | None = None
    salt: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"mode={self.mode!r} is unknown: use one of {', '.join(map(repr, get_args(Mode)))}")
        if self.mode != "blend" and (self.selector is not None or self.recompute_ratio is not None):
            raise ValueError(
                f"mode={self.mode!r} says what is computed again: leave selector and recompute_ratio out, or use "
                "'blend'"
            )
        last = self.parts[-1] if self.parts else None
        if last is None or not last.token_ids or (last.chunk is not None and last.chunk.has_kv):
            raise ValueError("the composition has no question: its last token is what the answer follows")
        for chunk in self.chunks:
            if chunk.salt != self.salt:
                raise ValueError(
                    f"chunk {chunk.id!r} was registered with another cache_salt than the composition's, or one of the "
                    "two has none: register it with this cache_salt, too"
                )

    def __repr__(self) -> str:
        parts = ", ".join(f"{part.role} {len(part.token_ids)}" for part in self.parts)
        return f"ChunkComposition({self.mode}, {len(self.token_ids)} tokens: {parts})"

    @property
    def token_ids(self) -> list[int]:
        return [token for part in self.parts for token in part.token_ids]

    @property
    def chunks(self) -> list[Chunk]:
        """Return the chunks in their order, each as often as it stands there."""
        return [part.chunk for part in self.parts if part.chunk is not None]

    @property
    def variants(self) -> list[tuple[str, str]]:
        """Return the ids of chunks that have other tokens here, each with the key of their KV here."""
        return [(part.chunk.id, part.placed.id) for part in self.parts if part.chunk and part.placed]

    def placed(self) -> list[PlacedPart]:
        """Return every part with its positions."""
        result, start = [], 0
        for part in self.parts:
            result.append(PlacedPart(part, start, start + len(part.token_ids)))
            start += len(part.token_ids)
        return result

    def parse(self) -> ParsedPrompt:
        """Return the prompt that the engine runs."""
        stored = [
            (placed, placed.part.stored)
            for placed in self.placed()
            if placed.part.stored is not None and placed.part.stored.has_kv
        ]
        if self.mode == "exact" or not stored:
            return ParsedPrompt(self.token_ids, salt=self.salt, is_composed=True)
        # Positions before the first stored chunk are computed, like all between chunks.
        return ParsedPrompt(
            self.token_ids,
            chunk_bounds=tuple((placed.start, placed.stop) for placed, _ in stored),
            blend_selector="none" if self.mode == "reuse" else self.selector,
            blend_recompute_ratio=self.recompute_ratio,
            pieces=tuple(StoredPiece(p.start, chunk.stored, chunk.context_token_ids) for p, chunk in stored),
            retain=self.retain,
            salt=self.salt,
            is_composed=True,
        )


def matching_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Return how many leading tokens, or characters, two sequences share."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
