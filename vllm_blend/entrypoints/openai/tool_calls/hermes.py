"""The format of Hermes and Qwen."""

from __future__ import annotations

from vllm_blend.entrypoints.openai.tool_calls.parser import ToolParser
from vllm_blend.entrypoints.openai.tool_calls.text_reader import Steps

_BEGIN, _END = "<tool_call>", "</tool_call>"


class Hermes(ToolParser):
    """`<tool_call>{"name": "f", "arguments": {...}}</tool_call>`, any number of times, with content around."""

    name = "hermes"

    def _run(self) -> Steps[None]:
        while (yield from self._until(_BEGIN, self._say)):
            self._hold(len(_BEGIN))
            if (yield from self._try(self._call(), end=_END)):
                yield from self._next()
                if (yield from self._accept(_END)):
                    self._held.clear()
