"""Where in a text stop strings count: behind the reasoning that it begins with."""

from __future__ import annotations


class AfterReasoning:
    """Finds the place behind a text's reasoning while the text grows, and reads no character twice.

    Reasoning stands at the beginning of the text, between `begin` and `end`. With an empty `begin` the text is within
    it from the start. White space around the marks belongs to them, as the parser of reasoning has it.
    """

    def __init__(self, begin: str, end: str) -> None:
        self._begin, self._end = begin, end
        self.is_inside = not begin
        self._searched = 0
        self._behind: int | None = None  # the place behind the closing mark

    def find(self, text: str) -> int | None:
        """Return the place from which on stop strings count in a text of which more may come; None if that is not known
        yet, or is not there yet."""
        if not self.is_inside:
            shown = text.lstrip()
            if not shown or (len(shown) < len(self._begin) and self._begin.startswith(shown)):
                return None
            if not shown.startswith(self._begin):
                return 0
            self.is_inside = True
            self._searched = len(text) - len(shown) + len(self._begin)
        if self._behind is None:
            at = text.find(self._end, self._searched)
            if at < 0:
                self._searched = max(self._searched, len(text) - len(self._end) + 1)
                return None
            self._behind = at + len(self._end)
        rest = len(text[self._behind :].lstrip())
        return len(text) - rest if rest else None
