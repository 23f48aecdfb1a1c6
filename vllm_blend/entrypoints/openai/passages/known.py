"""What a tenant has sent, and has registered: texts by the digest of what they say."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from vllm_blend.entrypoints.openai.passages.anchors import TextIndex

# A text that is no passage as a whole; one that is; one that has been a chunk with the blank line after it; or without.
PART, SEEN, USED, BARE = range(4)
MOVED = b""  # in place of what stands before a passage that has stood after different texts
ENTRY = 256  # bytes of text that take as much memory as an entry


@dataclass
class KnownPassages:
    """What has been seen lately. `seen`: a text -> what stood before it, how often, and what it is. `prefixes`: the
    beginnings of prompts that were computed without chunks. `young` and `old` have the texts themselves; when `young`
    is full it becomes the old one, whose texts move on when they are used."""

    seen: OrderedDict[bytes, tuple[bytes, int, int]] = field(default_factory=OrderedDict)
    prefixes: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    young: TextIndex = field(default_factory=TextIndex)
    old: TextIndex = field(default_factory=TextIndex)

    @property
    def size(self) -> int:
        return len(self.seen) + len(self.prefixes) + (len(self.young.data) + len(self.old.data)) // ENTRY

    def remember(self, text: bytes, before: bytes, kind: int) -> None:
        last, count, was = self.seen.get(text, (before, 0, PART))
        self.seen[text] = (before if last == before else MOVED, count + 1, max(was, kind))
        self.seen.move_to_end(text)

    def kind(self, text: bytes) -> int:
        return self.seen.get(text, (MOVED, 0, PART))[2]

    def break_up(self, text: bytes) -> None:
        """Take a text for no passage as a whole, unless it has been a chunk."""
        before, count, kind = self.seen.get(text, (MOVED, 0, PART))
        if kind == SEEN:
            self.seen[text] = (before, count, PART)

    def trim(self, max_passages: int, max_bytes: int, max_prefixes: int) -> None:
        """Forget the oldest of what is too much."""
        if 2 * len(self.young.names) > max_passages or 2 * len(self.young.data) > max_bytes:
            self.young, self.old = TextIndex(), self.young
        while len(self.seen) > max_passages:
            self.seen.popitem(last=False)
        while len(self.prefixes) > max_prefixes:
            self.prefixes.popitem(last=False)


@dataclass
class RegisteredPassages:
    """Passages that are known until they are forgotten as often."""

    counts: Counter[bytes] = field(default_factory=Counter)
    texts: TextIndex = field(default_factory=TextIndex)

    def forget(self, name: bytes) -> None:
        self.counts[name] -= 1
        if not self.counts[name]:
            del self.counts[name]
            self.texts.forget(name)
            if 2 * self.texts.num_forgotten > len(self.texts.data):
                self.texts = self.texts.compacted()


def digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()
