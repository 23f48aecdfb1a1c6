"""JSON that arrives in pieces: where a value ends, and whether it is valid so far."""

from __future__ import annotations

import re

SPACE = re.compile(r"[ \t\r\n]*")
_CHARACTERS = re.compile(r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_WORD = re.compile(r"[-+.0-9a-zA-Z]*")
_SCALAR = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_MAX_WORD = 400  # characters of a number or a word, which are read as a whole
_CLOSING = {"{": "}", "[": "]"}


class JsonScanner:
    """Follows one JSON value through a text that arrives in pieces, and reads every character once.

    `done` is set behind the value's last character, `broken` at a character that no valid value could have there. A
    number ends where something else follows. `has_member` says that the value is an object whose first member has a
    valid beginning, or that it is an empty object.
    """

    def __init__(self) -> None:
        self.done = self.broken = self.has_member = False
        self._open: list[str] = []  # brackets
        self._expected = "value"  # or "value or ]", "key", "key or }", ":", ","
        self._in_string = False

    def scan(self, text: str, start: int) -> int:
        """Read `text` from `start`; return where the scanner stopped. What stands behind that is to be given again,
        with more text, unless the value is done or broken."""
        position = start
        while position < len(text) and not (self.done or self.broken):
            after = self._scan_string(text, position) if self._in_string else self._scan_token(text, position)
            if after == position:  # an escape or a word is not complete
                break
            position = after
        return position

    def _scan_string(self, text: str, position: int) -> int:
        match = _CHARACTERS.match(text, position)
        position = match.end() if match else position
        if position == len(text) or _PARTIAL_ESCAPE.match(text, position):
            return position
        if text[position] != '"':
            self.broken = True
            return position
        self._in_string = False
        if self._expected.startswith("key"):
            self._expected = ":"
        else:
            self._end_value()
        return position + 1

    def _scan_token(self, text: str, position: int) -> int:
        character = text[position]
        if character in " \t\r\n":
            match = SPACE.match(text, position)
            return match.end() if match else position
        if self._expected.startswith("value") and character not in '"{[]':
            return self._scan_scalar(text, position)
        self._take(character)
        return position if self.broken else position + 1

    def _take(self, character: str) -> None:
        """Go on behind a quote, a bracket, a colon or a comma."""
        expected = self._expected
        if expected.startswith("value") and character in '"{[':
            self._begin_value()
            self._in_string = character == '"'
            if character in _CLOSING:
                self._open.append(character)
                self._expected = "key or }" if character == "{" else "value or ]"
        elif expected.startswith("key") and character == '"':
            self._in_string = True
        elif expected == ":" == character:
            self._expected = "value"
        elif expected == "," == character:
            self._expected = "key" if self._open[-1] == "{" else "value"
        elif (expected == "," and character == _CLOSING[self._open[-1]]) or expected.endswith(f"or {character}"):
            self.has_member |= self._open == ["{"]
            self._open.pop()
            self._end_value()
        else:
            self.broken = True

    def _scan_scalar(self, text: str, position: int) -> int:
        match = _WORD.match(text, position)
        stop = match.end() if match else position
        if position < stop == len(text) and stop - position <= _MAX_WORD:
            return position
        if not _SCALAR.fullmatch(text, position, stop):
            self.broken = True
            return position
        self._begin_value()
        self._end_value()
        return stop

    def _begin_value(self) -> None:
        self.has_member |= self._open == ["{"]

    def _end_value(self) -> None:
        self.done = not self._open
        self._expected = ","
