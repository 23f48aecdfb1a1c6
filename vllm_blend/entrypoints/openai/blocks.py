"""An answer as a row of blocks, reasoning, text and tool calls, as the APIs of Responses and Messages have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from vllm_blend.entrypoints.openai.output_parser import OutputParser
from vllm_blend.entrypoints.openai.tool_calls.deltas import MessageDelta

Kind = Literal["reasoning", "text", "call"]
Step = Literal["open", "more", "close"]


@dataclass
class Block:
    """A part of an answer. `text` is what there is of it: for a call, the JSON text of its arguments."""

    index: int
    kind: Kind
    id: str = ""  # of a call
    name: str = ""
    text: str = ""


class BlockReader:
    """Splits the text of an answer into blocks, whole or in pieces."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser = parser
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._call: int | None = None  # the number of the open call

    def feed(self, text: str, ends: bool) -> Iterator[tuple[Step, Block, str]]:
        """Yield what a piece of text does: a block opens, it gets more text, or it closes. `ends`: nothing follows."""
        deltas = [self._parser.feed(text)]
        if ends:
            deltas.append(self._parser.finish())
        for delta in deltas:
            yield from self._take(delta)
        if ends:
            if not self.blocks:  # an empty answer has an empty text
                yield "open", self._begin(Block(0, "text")), ""
            yield from self._close()

    @property
    def num_held(self) -> int:
        """Return how many characters at the end of the answer so far are in no block yet."""
        return self._parser.num_held

    def is_cut_by(self, stop_reason: int | str | None) -> bool:
        return self._parser.is_cut_by(stop_reason)

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.blocks)

    def _take(self, delta: MessageDelta) -> Iterator[tuple[Step, Block, str]]:
        if delta.reasoning:
            yield from self._write("reasoning", delta.reasoning)
        if delta.content:
            yield from self._write("text", delta.content)
        for call in delta.calls:
            if call.id is not None:
                yield from self._close()
                self._call = call.index
                yield "open", self._begin(Block(len(self.blocks), "call", call.id, call.name or "")), ""
            if call.arguments and self._open is not None and self._call == call.index:
                self._open.text += call.arguments
                yield "more", self._open, call.arguments

    def _write(self, kind: Kind, text: str) -> Iterator[tuple[Step, Block, str]]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            yield "open", self._begin(Block(len(self.blocks), kind)), ""
        assert self._open is not None
        self._open.text += text
        yield "more", self._open, text

    def _begin(self, block: Block) -> Block:
        self.blocks.append(block)
        self._open = block
        return block

    def _close(self) -> Iterator[tuple[Step, Block, str]]:
        if self._open is not None:
            yield "close", self._open, ""
        self._open = self._call = None
