"""The output of requests that must call a function, which a grammar holds to JSON (see tool_choice.py)."""

from __future__ import annotations

from vllm_blend.entrypoints.openai.tool_calls.parser import ToolParser
from vllm_blend.entrypoints.openai.tool_calls.text_reader import Steps


class RequiredCalls(ToolParser):
    """`[{"name": "f", "parameters": {...}}, ...]`: some functions, of the model's choice."""

    name = "required"
    needs_special_tokens = False

    def _run(self) -> Steps[None]:
        yield from self._try(self._calls_in_list())
        yield from self._until(None, self._say)

    def _release(self) -> None:
        """Drop what was held back at the end: it is the beginning of a call that was cut off, and no content."""
        if self._ended:
            self._held.clear()
        else:
            super()._release()


class NamedCall(ToolParser):
    """The arguments of one function, which the request names, and nothing else."""

    name = "named"
    needs_special_tokens = False

    def __init__(self, function: str) -> None:
        super().__init__()
        self.function = function

    def _run(self) -> Steps[None]:
        self._announce(self.function)
        yield from self._until(None, self._write_arguments)
