"""The format of Llama 3.1 and later for JSON calls."""

from __future__ import annotations

from vllm_blend.entrypoints.openai.tool_calls.parser import ToolParser
from vllm_blend.entrypoints.openai.tool_calls.text_reader import Steps

_TAG = "<|python_tag|>"


class Llama3Json(ToolParser):
    """`{"name": "f", "parameters": {...}}`, several of them with `;` between, and `<|python_tag|>` before or not.

    Without the tag, calls are only at the beginning of the text, have parameters, and name a known function: other
    JSON is content.
    """

    name = "llama3_json"

    def _run(self) -> Steps[None]:
        if (yield from self._next()) == "{":
            yield from self._read_calls(has_tag=False)
        while (yield from self._until(_TAG, self._say)):
            self._hold(len(_TAG))
            yield from self._read_calls(has_tag=True)

    def _read_calls(self, has_tag: bool) -> Steps[None]:
        known = None if has_tag else self.known
        while (yield from self._try(self._call(known, needs_arguments=not has_tag))):
            while (yield from self._next()) == ";":
                self._hold(1)
            yield from self._accept(_TAG)
            if not (yield from self._next()):
                self._held.clear()  # no call and no content follows
                return
