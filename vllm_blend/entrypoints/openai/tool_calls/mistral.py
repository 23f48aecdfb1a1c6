"""The formats of Mistral, older and newer."""

from __future__ import annotations

import re
import secrets
import string

from vllm_blend.entrypoints.openai.tool_calls.parser import Malformed, ToolParser
from vllm_blend.entrypoints.openai.tool_calls.text_reader import Steps

_BEGIN, _CALL_ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_WORD = re.compile(r"[\w.-]*")
_MAX_WORD = 256  # characters of a function's name, or of an id
_ALPHABET = string.ascii_letters + string.digits


class Mistral(ToolParser):
    """`[TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]`, or `[TOOL_CALLS]f[ARGS]{...}` for each call, which may
    have a `[CALL_ID]` before its arguments. Ids are new ones, of the nine characters that the templates demand."""

    name = "mistral"

    def _run(self) -> Steps[None]:
        while (yield from self._until(_BEGIN, self._say)):
            self._hold(len(_BEGIN))
            character = yield from self._next()
            forms = {"[": self._calls_in_list, "{": self._call}
            yield from self._try(forms.get(character, self._named_call)(), end=_BEGIN)

    def _named_call(self) -> Steps[None]:
        name = yield from self._word()
        if (yield from self._accept(_CALL_ID)):
            yield from self._word()
        yield from self._accept(_ARGUMENTS)
        if not name or (yield from self._next()) != "{":
            raise Malformed
        yield from self._arguments(name)
        self._end_call()

    def _word(self) -> Steps[str]:
        start = len(self._held)
        while True:
            match = _WORD.match(self._text, self._position)
            self._hold(match.end() - self._position if match else 0)
            word = "".join(self._held[start:])
            if len(word) > _MAX_WORD:
                raise Malformed
            if self._position < len(self._text) or self._ended:
                return word
            yield

    def _make_id(self) -> str:
        return "".join(secrets.choice(_ALPHABET) for _ in range(9))
