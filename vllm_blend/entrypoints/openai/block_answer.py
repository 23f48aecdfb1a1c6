"""The answer to one call in the APIs of Responses and Messages: read as blocks, whole or as a stream of events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from vllm_blend.detokenizer import TokenTexts, token_bytes_function
from vllm_blend.entrypoints.openai.block_logprobs import BlockLogprobs
from vllm_blend.entrypoints.openai.blocks import Block, BlockReader, Step
from vllm_blend.entrypoints.openai.chat_request import ChatCall
from vllm_blend.entrypoints.openai.generation import Generation
from vllm_blend.entrypoints.openai.logprobs import chat_logprobs
from vllm_blend.entrypoints.openai.protocol.chat import TokenLogprob
from vllm_blend.entrypoints.openai.reasoning import count_reasoning
from vllm_blend.entrypoints.openai.server import Server
from vllm_blend.entrypoints.openai.usage import UsageCounter
from vllm_blend.outputs import CompletionOutput, RequestOutput


@dataclass
class BlockAnswer(ABC):
    """Reads the one completion of a call. What an API's events look like is left to its class."""

    server: Server
    call: ChatCall
    id: str

    def __post_init__(self) -> None:
        self._counter = UsageCounter()
        self._reader = BlockReader(self.call.parsers.make(self.call.prompt.text))
        self._token_ids: list[int] = []
        tokenizer = self.server.engine.get_tokenizer()
        self._texts = TokenTexts(tokenizer, self.call.params.skip_special_tokens, self.call.prompt.token_ids)
        self._logprobs = BlockLogprobs()

    def _read_whole(self, output: RequestOutput) -> CompletionOutput:
        """Read the output of a call that does not stream. Return its completion."""
        [completion] = output.outputs
        self._counter.add(0, output)
        for _ in self._steps(completion):
            pass
        return completion

    async def events(self, generation: Generation) -> AsyncGenerator[str, None]:
        """Yield the events of a stream."""
        begun, last = False, None
        async with aclosing(generation.outputs()) as outputs:
            async for index, output in outputs:
                self._counter.add(index, output)
                if not begun:
                    begun = True
                    for event in self._first_events():
                        yield event
                for last in output.outputs:
                    for step, block, text in self._steps(last):
                        for event in self._block_events(step, block, text):
                            yield event
        if last is not None:
            for event in self._last_events(last):
                yield event

    def _steps(self, completion: CompletionOutput) -> Iterator[tuple[Step, Block, str]]:
        """Return what new tokens do to the blocks (see `BlockReader.feed`)."""
        self._token_ids += completion.token_ids
        if completion.logprobs is not None:
            self._logprobs.add(self._new_logprobs(completion, completion.logprobs))
        return self._logprobs.steps(self._reader, completion.text, completion.finish_reason is not None)

    def _new_logprobs(self, completion: CompletionOutput, given: Sequence[Any]) -> list[TokenLogprob]:
        tokenizer = self.server.engine.get_tokenizer()
        texts = self._texts.read(completion.token_ids, completion.text, completion.finish_reason is not None)
        bytes_of = token_bytes_function(tokenizer, len(tokenizer))
        num_top = self.call.params.logprobs or 0
        return chat_logprobs(completion.token_ids, texts, given, num_top, False, bytes_of).content or []

    def _num_reasoning_tokens(self) -> int:
        """Return how many tokens of the answer belong to its reasoning, once it has been read."""
        if all(block.kind != "reasoning" for block in self._reader.blocks):
            return 0
        return count_reasoning(self.server.engine.get_tokenizer().convert_ids_to_tokens(self._token_ids))

    @abstractmethod
    def _first_events(self) -> Iterator[str]:
        """Yield the events that begin a stream."""

    @abstractmethod
    def _block_events(self, step: Step, block: Block, text: str) -> Iterator[str]:
        """Yield the events of what a piece of text does to a block (see `BlockReader.feed`)."""

    @abstractmethod
    def _last_events(self, completion: CompletionOutput) -> Iterator[str]:
        """Yield the events that end a stream; `completion` has the finish reason."""
