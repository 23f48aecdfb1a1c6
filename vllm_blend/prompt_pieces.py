"""Texts as tokens: the tokens of a whole prompt, which piece of it each belongs to, and control tokens that are text.

The ids of a prompt are those of its whole text, whatever it is made of: a tokenizer gives other ids to pieces one by
one, as SentencePiece puts a space before each. The offsets of the tokens say which piece each stands in. A token that
reaches over the edge of a piece belongs to no piece: it is computed like the text between chunks.

In pieces that are literal (passages, documents, results of tools) control tokens such as `<|im_start|>` are text. No
token of such a piece, or of its seam with another one, begins a turn.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, pairwise

import tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from vllm_blend.hidden_tokens import Span as Span
from vllm_blend.hidden_tokens import hidden_tokens, may_hide


class TrustedText(str):
    """A piece of a prompt in which control tokens are what they are to the model, although pieces in its place are
    literal."""

    __slots__ = ()


@dataclass(frozen=True)
class TextTokens:
    """The tokens of a text: their ids, and where the text of each starts and stops. `offsets` is empty if the tokenizer
    does not say."""

    ids: list[int]
    offsets: Sequence[Span]

    @property
    def have_offsets(self) -> bool:
        return bool(self.offsets)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(start for start, _ in self.offsets)

    @cached_property
    def _stops(self) -> tuple[int, ...]:
        return tuple(stop for _, stop in self.offsets)

    def own(self, span: Span) -> tuple[Span, bool]:
        """Return the tokens (first, last + 1) that lie within a span of characters, and whether others reach into it.
        Without tokens of its own a span has an empty range, at the place where it stands."""
        starts, stops = self._starts, self._stops
        first, last = bisect_left(starts, span[0]), bisect_right(stops, span[1])
        is_shared = (first > 0 and stops[first - 1] > span[0]) or (last < len(starts) and starts[last] < span[1])
        return (first, max(first, last)), is_shared

    def within(self, spans: Iterable[Span]) -> tuple[list[Span], int]:
        """Return the tokens of spans of characters, as `own`, and how many spans share a token with the text beside
        them. A span without a token of its own is left out. So is one that has the last token of all: the answer
        follows that."""
        bounds, num_shared = [], 0
        for span in spans:
            (first, last), is_shared = self.own(span)
            num_shared += is_shared
            if first < last < len(self.ids):
                bounds.append((first, last))
        return bounds, num_shared

    def count_before(self, position: int, limit: int) -> int:
        """Return how many of the first `limit` tokens end at a character at the latest."""
        return bisect_right(self._stops, position, hi=limit)


@dataclass(frozen=True)
class PromptPieces:
    """The tokens of a prompt that is made of pieces, and those that belong to each: (start, stop), an empty range for a
    piece without any of its own."""

    token_ids: list[int]
    bounds: list[Span]


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str, literal: Iterable[Span] = ()) -> TextTokens:
    """Return the tokens of a text, without special tokens that it does not hold itself. In `literal` spans of it there
    are none: what reads like one is text. So are special tokens that `HiddenTokens.hide` has hidden in the text.

    Raises ValueError if a literal span holds a control token and the tokenizer cannot take it for text.
    """
    if may_hide(text):
        text, hidden = hidden_tokens(tokenizer).reveal(text)
        literal = sorted([*literal, *hidden])
    tokens = _tokenize(tokenizer, text)
    spans = [span for span in literal if span[0] < span[1]]
    if not spans:
        return tokens
    control = control_tokens(tokenizer)
    if not tokens.have_offsets:
        if found := next(filter(None, (control.pattern.search(text, *span) for span in spans)), None):
            raise ValueError(
                f"a passage, document or result holds the control token {found[0]!r}, and this tokenizer, which is not "
                "a fast one, cannot take it for text: remove it, or start the engine with trusted_chunks=True if all "
                "texts come from you"
            )
        return tokens
    forged = (tokens.offsets[index] for index, token in enumerate(tokens.ids) if token in control.ids)
    if any(start < stop and start < each[1] and each[0] < stop for each in forged for start, stop in spans):
        return control.tokenize(text, spans)
    return tokens


def join_pieces(
    tokenizer: PreTrainedTokenizerBase | None,
    pieces: Sequence[str | Sequence[int]],
    literal: Sequence[bool],
    begins: bool = True,
    ends: bool = True,
    adds_bos: bool = True,
) -> PromptPieces:
    """Return the tokens of pieces, which are texts or token ids, one after another. Neighbouring texts are one text, so
    a text beside token ids is tokenized apart from them. `begins` and `ends` say whether the pieces begin a prompt and
    end it; otherwise other text stands there. With `begins`, and unless `adds_bos` is
    False, a text that comes first has BOS before it, once.

    Raises ValueError as `tokenize` does, and if there is a text but no tokenizer.
    """
    ids: list[int] = []
    bounds: list[Span] = []
    for is_text, group in groupby(range(len(pieces)), key=lambda index: isinstance(pieces[index], str)):
        run = list(group)
        if not is_text:
            for index in run:
                bounds.append((len(ids), len(ids) + len(pieces[index])))
                ids += pieces[index]  # type: ignore[arg-type]
            continue
        texts = [str(pieces[index]) for index in run]
        if tokenizer is None and not any(texts):
            bounds += [(len(ids), len(ids))] * len(run)
            continue
        if tokenizer is None:
            raise ValueError("a piece is text, but the engine has no tokenizer: give token ids, or a tokenizer")
        is_first, is_last = begins and run[0] == 0, run[-1] == len(pieces) - 1
        flags = [literal[index] for index in run]
        found = _join_texts(tokenizer, texts, flags, is_first, ends or not is_last, is_first and adds_bos)
        bounds += [(len(ids) + start, len(ids) + stop) for start, stop in found.bounds]
        ids += found.token_ids
    return PromptPieces(ids, bounds)


def encode_alone(tokenizer: PreTrainedTokenizerBase, text: str, literal: bool = False) -> list[int]:
    """Return the token ids that a text has where it stands in the middle of a prompt, its edges being edges of
    tokens."""
    return join_pieces(tokenizer, [text], [literal], begins=False, ends=False).token_ids


def encode_start(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text that begins a prompt. What the tokenizer puts before a text (BOS) comes first,
    once; what it may put behind (EOS) is left out, as a prompt goes on."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    return [*_bos_before(tokenizer, ids), *ids]


def _bos_before(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    if bos is None or list(ids[:1]) == [bos] or list(tokenizer.encode("", add_special_tokens=True))[:1] != [bos]:
        return []
    return [bos]


def _join_texts(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    literal: Sequence[bool],
    begins: bool,
    ends: bool,
    adds_bos: bool,
) -> PromptPieces:
    """Return the tokens of neighbouring texts. Where they do not begin or end a prompt, a line end or a letter that
    leaves their own tokens as they are stands in for what is beside them."""
    whole = "".join(texts)
    before = "" if begins else "A" if whole[:1].isspace() else "\n"
    after = "A" if whole[-1:].isspace() and not ends else ""
    tries = [(before, after), (before, ""), ("", "")] if whole else [("", "")]
    for left, right in dict.fromkeys(tries):
        edges = list(accumulate(map(len, texts), initial=len(left)))
        spans = list(pairwise(edges))
        secret = [span for span, is_literal in zip(spans, literal, strict=True) if is_literal]
        tokens = tokenize(tokenizer, f"{left}{whole}{right}", secret)
        if not tokens.have_offsets:
            return _join_without_offsets(tokenizer, texts, secret, adds_bos)
        (first, last), is_shared = tokens.own((edges[0], edges[-1]))
        if not (left or right):
            first, last = 0, len(tokens.ids)  # offsets of no width among them
        elif is_shared:
            continue
        bos = _bos_before(tokenizer, tokens.ids) if adds_bos else []
        bounds = [tokens.own(span)[0] for span in spans]
        shift = len(bos) - first
        moved = [(start + shift, stop + shift) for start, stop in bounds]
        moved[0] = (0, moved[0][1] if spans[0][0] < spans[0][1] else len(bos))
        return PromptPieces([*bos, *tokens.ids[first:last]], moved)
    raise AssertionError("the last try has no text beside the pieces")


def _join_without_offsets(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], literal: Sequence[Span], adds_bos: bool
) -> PromptPieces:
    """Return the tokens of texts for a tokenizer that does not say where they stand: pieces have tokens of their own
    only if the whole text has the tokens of the pieces."""
    ids = tokenize(tokenizer, "".join(texts), literal).ids
    apart = [tokenize(tokenizer, text).ids for text in texts]
    bos = _bos_before(tokenizer, ids) if adds_bos else []
    if [token for each in apart for token in each] != ids:
        return PromptPieces([*bos, *ids], [(0, len(bos)), *[(len(bos), len(bos))] * (len(texts) - 1)])
    edges = list(accumulate(map(len, apart), initial=len(bos)))
    return PromptPieces([*bos, *ids], [(0, edges[1]), *pairwise(edges[1:])])


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> TextTokens:
    if not tokenizer.is_fast:
        return TextTokens(list(tokenizer.encode(text, add_special_tokens=False)), ())
    backend = _without_trimming(tokenizer, len(tokenizer))
    if backend is None:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return TextTokens(encoded["input_ids"], encoded["offset_mapping"])
    encoding = backend.encode(text, add_special_tokens=False)
    names = ("__call__", "encode", "_encode_plus", "_batch_encode_plus")
    if all(getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in names):
        return TextTokens(encoding.ids, encoding.offsets)  # it leaves the ids to its backend, as all fast ones do
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return TextTokens(ids, encoding.offsets if encoding.ids == ids else ())


@lru_cache(maxsize=4)
def _without_trimming(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> tokenizers.Tokenizer | None:
    """Return a copy of a tokenizer of `num_tokens` tokens whose offsets are true. None if its own are: some
    post-processors of byte-level tokenizers leave white space out of them."""
    processor = tokenizer.backend_tokenizer.post_processor
    if processor is None or b'"trim_offsets":true' not in processor.__getstate__():
        return None
    backend: tokenizers.Tokenizer = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and those added ones that its chat template writes.

    To take them for text where they are none of the prompt's, they are given secret names: a copy of the tokenizer
    knows them by these alone, and the text has a name where a control token is meant.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        template = tokenizer.chat_template or ""
        templates = "".join(template.values()) if isinstance(template, Mapping) else template
        self.ids = {
            token: added.content
            for token, added in tokenizer.added_tokens_decoder.items()
            if added.content.strip() and (added.special or added.content in templates)
        }
        self.ids.update(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        self.ids.pop(tokenizer.unk_token_id, None)  # words that are not in the vocabulary begin no turn
        ordered = sorted(self.ids.values(), key=len, reverse=True)  # as tokenizers do it: the longest
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._beginnings = {text[:length] for text in ordered for length in range(1, len(text))}
        self._longest = max(map(len, ordered), default=0)
        self._nonce = secrets.token_hex(16)
        self._tokenizer = tokenizer

    def concerns(self, text: str) -> bool:
        """Return whether a text holds a control token, or ends as one begins, so that the next text may complete it."""
        if self.pattern.search(text):
            return True
        ends = [end[-length:] for end in {text, text.strip()} for length in range(1, min(self._longest, len(end)) + 1)]
        return any(end in self._beginnings for end in ends)

    def tokenize(self, text: str, literal: Sequence[Span]) -> TextTokens:
        """Return the tokens of a text without any control token in, or reaching into, `literal` spans of it."""
        parts: list[str] = []
        edges: list[tuple[int, int]] = []  # (place in the text with names, place in the text), ascending
        position, length = 0, 0

        def add(part: str, stop: int) -> None:
            nonlocal position, length
            parts.append(part)
            length += len(part)
            position = stop
            edges.append((length, position))

        starts = [span[0] for span in sorted(literal)]
        for start, stop in zip([0, *(span[1] for span in sorted(literal))], [*starts, len(text)], strict=True):
            for found in self.pattern.finditer(text, start, stop):
                add(text[position : found.start()], found.start())
                add(self._name(found[0]), found.end())
        add(text[position:], len(text))
        encoding = self._renamed.encode("".join(parts), add_special_tokens=False)
        places = [place for place, _ in edges]

        def original(place: int) -> int:
            after, before = edges[bisect_left(places, place)]
            return before - (after - place)

        return TextTokens(encoding.ids, [(original(start), original(stop)) for start, stop in encoding.offsets])

    def _name(self, content: str) -> str:
        return f"\ue000{self._nonce}x{content.encode().hex()}\ue001"

    @cached_property
    def _renamed(self) -> tokenizers.Tokenizer:
        """Return a copy of the tokenizer in which control tokens have their secret names."""
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        names = {content: self._name(content) for content in self.ids.values()}
        state |= {"post_processor": None, "truncation": None, "padding": None}
        for added in state["added_tokens"]:
            added["content"] = names.get(added["content"], added["content"])
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(token, token): number for token, number in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in model["vocab"]]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        renamed: tokenizers.Tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
        for number, content in self.ids.items():
            if renamed.token_to_id(names[content]) != number:
                raise RuntimeError(f"the tokenizer's control token {content!r} has another id in a copy of it")
        return renamed


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> ControlTokens:
    """Return the control tokens of a tokenizer as it is now."""
    return _control_tokens(tokenizer, len(tokenizer), repr(tokenizer.chat_template))


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: PreTrainedTokenizerBase, num_tokens: int, template: str) -> ControlTokens:
    return ControlTokens(tokenizer)
