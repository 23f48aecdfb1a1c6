"""Token ids to text while they arrive, and the stop strings in that text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from weakref import WeakKeyDictionary

from tokenizers import decoders
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from vllm_blend.outputs import Logprob
from vllm_blend.sampling_params import SamplingParams
from vllm_blend.stop_scope import AfterReasoning
from vllm_blend.stop_strings import StopStrings

_UNDECODABLE = "\ufffd"  # stands for bytes that are no character, or not yet
_CONTEXT_TOKENS = 8  # of the prompt: decoders look back at neighbours only
_MAX_UNDECODED = 8  # tokens; a character has at most 4 bytes, and a token at least 1
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_MAX_PIECES = 1 << 16  # that are remembered of a tokenizer: some 10 MiB


class Detokenizer:
    """The text of one output, token by token.

    Text is what decoding prompt and output together puts after the prompt, so a leading space is kept. The text stays
    empty, and nothing is decoded, if `params.detokenize` is off or the engine has no tokenizer.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self._params = params
        self._stops = StopStrings.of(params.stop) if params.stop else None
        marks = params.reasoning_marks if params.stop else None
        self._scope = None if marks is None else AfterReasoning(*marks)  # until stop strings count
        self._decoder = (
            _IncrementalDecoder(tokenizer, params, prompt_token_ids) if tokenizer and params.detokenize else None
        )
        self._text = ""  # certain text, cut at the stop string once one is found
        self._searched = 0  # characters of it that were looked through for stop strings
        self._state = 0  # of `_stops`, after those
        self._num_tokens = 0
        self._stopped = False

    def append(self, token_id: int, ends: bool = False) -> str | None:
        """Add a token; return the stop string that ends the output with it, if one does.

        `ends` says that the token itself ended the output (end of sequence or a stop token): it is no text then, unless
        `include_stop_str_in_output`. If several stop strings are there, the one completed first counts, the longest of
        those. Stop strings completed within the first `min_tokens` tokens, or within reasoning, are passed over.
        """
        self._num_tokens += 1
        if self._decoder is None or (ends and not self._params.include_stop_str_in_output):
            return None
        self._text += self._decoder.step(token_id)
        if self._stops is None:
            return None
        if self._scope is not None:
            place = self._scope.find(self._text)
            if place is None:
                return None
            self._searched, self._scope = place, None
        return self._find_stop(self._stops, not ends and self._num_tokens > self._params.min_tokens)

    @property
    def text(self) -> str:
        """Return the text so far, up to a stop string; bytes that make no character yet show as U+FFFD."""
        if self._decoder is None or self._stopped:
            return self._text
        return self._text + self._decoder.pending()

    def stream_text(self, finished: bool) -> str:
        """Return the part of the text that later tokens cannot change: a prefix of every later one.

        Left out until `finished`: incomplete characters, and an end that may become a stop string.
        """
        if finished or self._stopped:
            return self.text
        if self._scope is not None:  # what may still turn out to be no reasoning may hold a stop string
            return self._text if self._scope.is_inside else ""
        if self._params.include_stop_str_in_output or self._stops is None:
            return self._text
        return self._text[: len(self._text) - self._stops.held[self._state]]

    def _find_stop(self, stops: StopStrings, may_stop: bool) -> str | None:
        """Read on in the text; return the stop string that ends the output, if one may and does."""
        state = self._state
        for end in range(self._searched, len(self._text)):
            state = stops.step(state, self._text[end])
            length = stops.found[state]
            if length and may_stop:
                begin = end + 1 - length
                stop = self._text[begin : end + 1]
                self._text = self._text[: end + 1 if self._params.include_stop_str_in_output else begin]
                self._stopped = True
                return stop
        self._state, self._searched = state, len(self._text)
        return None


class _IncrementalDecoder:
    """Decodes a short window that slides over the tokens, and gives out what is new in it.

    The window starts where the last text ended on a whole character, one piece of text back, because what a token
    decodes to may depend on its neighbours (a leading space, the other bytes of a character).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, params: SamplingParams, prompt: Sequence[int]) -> None:
        skip = params.skip_special_tokens
        self._decode = _decode_function(tokenizer, skip)
        self._vocab_size = len(tokenizer)
        added = tokenizer.added_tokens_decoder
        self._silent = {i for i, token in added.items() if token.special} if skip else set()
        # without spaces between them, adjacent added tokens are written as they are
        self._unspaced = (
            {} if skip or params.spaces_between_special_tokens else {i: t.content for i, t in added.items()}
        )
        self._after_added = False  # whether the token before was one of those
        visible = (token for token in reversed(prompt) if self.is_visible(token))
        self._ids = list(islice(visible, _CONTEXT_TOKENS))[::-1]
        self._read = len(self._ids)  # tokens of the window whose text is out
        context = self._decode(self._ids)
        self._shown = len(context.rstrip(_UNDECODABLE))  # characters of the window's text that are out
        # a prompt may end in U+FFFD proper, or within a character that the output completes; the text after it tells
        self._broken_context = context if context.endswith(_UNDECODABLE) else ""
        self._pieces = _pieces_of(tokenizer, skip)
        self._is_whole = not self._broken_context  # whether all of the window's text is out, to a whole character

    def step(self, token: int) -> str:
        """Return the text that becomes certain with one more token."""
        if not self._is_whole or self._unspaced:
            return self._decode_with(token)
        key = self._pieces.key(self._ids, token)
        known = self._pieces.known.get(key)
        if known is not None and token not in self._silent:
            piece, self._shown = known
            self._ids, self._read = [token], 1
            return piece
        piece = self._decode_with(token)
        if piece and self._is_whole and key is not None:
            self._pieces.remember(key, piece, self._shown)
        return piece

    def _decode_with(self, token: int) -> str:
        if not self.is_visible(token):
            return ""
        self._ids.append(token)
        self._is_whole = False
        text = self._decode(self._ids)
        after_added, self._after_added = self._after_added, token in self._unspaced
        if text.endswith(_UNDECODABLE):
            return self._hold_back(text)
        piece = self._new(text)
        if piece:
            self._slide(self._ids[self._read :], 0)
        return self._unspaced[token] if after_added and self._after_added else piece

    def pending(self) -> str:
        """Return what the tokens held back decode to now."""
        return self._new(self._decode(self._ids))

    def is_visible(self, token: int) -> bool:
        return token not in self._silent and token < self._vocab_size

    def _new(self, text: str) -> str:
        if self._broken_context and text.startswith(self._broken_context):
            return text[len(self._broken_context) :]
        return text[self._shown :]

    def _hold_back(self, text: str) -> str:
        """Show what comes before the bytes at the end of `text` that make no character (yet)."""
        if len(self._ids) - self._read < _MAX_UNDECODED:
            certain = text.rstrip(_UNDECODABLE)
            piece = certain[self._shown :]
            self._shown = max(self._shown, len(certain))
            return piece
        # too many tokens for one character: only the last can be incomplete, the others never were characters
        piece = self._new(text)[:-1]
        self._slide(self._ids[-(_MAX_UNDECODED // 2) :], 1)
        return piece

    def _slide(self, window: list[int], num_unshown: int) -> None:
        self._ids = window
        self._read = 0 if num_unshown else len(window)
        self._shown = len(self._decode(window)) - num_unshown
        self._broken_context = ""
        self._is_whole = num_unshown == 0


class _Pieces:
    """The text that a token adds where everything before it is out, and the characters of that token alone.

    What a token decodes to may depend on its neighbours, but here on the one before it at most, as the decoder's window
    begins there; with a byte-level decoder, which joins bytes, on none. Looking a piece up takes 0.5 us in place of 10
    for two calls of the decoder, and a stream takes one for each of its tokens.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.known: dict[int | tuple[int, int] | None, tuple[str, int]] = {}
        self._joins_bytes = tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.decoder, decoders.ByteLevel)

    def key(self, window: Sequence[int], token: int) -> int | tuple[int, int] | None:
        """Return what the piece of `token` behind a window depends on; None for more than one token."""
        if self._joins_bytes:
            return token
        return (window[0], token) if len(window) == 1 else None

    def remember(self, key: int | tuple[int, int], piece: str, shown: int) -> None:
        if len(self.known) >= _MAX_PIECES:
            self.known.clear()
        self.known[key] = piece, shown


_PIECES: WeakKeyDictionary[PreTrainedTokenizerBase, dict[tuple[bool, int], _Pieces]] = WeakKeyDictionary()


def _pieces_of(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> _Pieces:
    """Return what is remembered of a tokenizer, as long as it has the same number of tokens."""
    by_settings = _PIECES.setdefault(tokenizer, {})
    key = (skip_special_tokens, len(tokenizer))
    if key not in by_settings:
        by_settings[key] = _Pieces(tokenizer)
    return by_settings[key]


class TokenTexts:
    """The texts and bytes of tokens one after another, so that those of all join to the text.

    The text of a character that takes several tokens is that of its last token; the bytes of each are its own. Tokens
    that the text leaves out, as special ones are by default, have neither, nor has what stands behind the text's end:
    the token or the string that ended it. `context` are the tokens before the first.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool = False, context: Sequence[int] = ()
    ) -> None:
        params = SamplingParams(skip_special_tokens=skip_special_tokens)
        self._decoder = _IncrementalDecoder(tokenizer, params, context)
        self._bytes_of = token_bytes_function(tokenizer, len(tokenizer))
        self._left = 0  # characters of the text that no token has had yet

    def read(self, token_ids: Sequence[int], text: str | None = None, ends: bool = False) -> list[tuple[str, bytes]]:
        """Return the text and the bytes of the next tokens. `ends`: no others follow, so that bytes that are no
        character show as U+FFFD. Where `text` is given, what has come of the whole one since the last call, tokens do
        not go beyond it."""
        self._left += len(text or "")
        found = self._read(token_ids, ends)
        if text is None:
            return found
        cut: list[tuple[str, bytes]] = []
        for own, own_bytes in found:
            if ends and self._left < max(1, len(own)):
                own = own[: max(0, self._left)]
                own_bytes = own.encode()
            self._left -= len(own)
            cut.append((own, own_bytes))
        return cut

    def _read(self, token_ids: Sequence[int], ends: bool) -> list[tuple[str, bytes]]:
        found: list[tuple[str, bytes]] = []
        for index, token in enumerate(token_ids):
            text = self._decoder.step(token)
            if ends and index == len(token_ids) - 1:
                text += self._decoder.pending()
            own = self._bytes_of(token) if self._decoder.is_visible(token) else b""
            is_spaced = text.strip().encode() == own.strip()  # a space at the beginning of a text is dropped
            found.append((text, text.encode() if is_spaced or not own else own))
        return found


@lru_cache(maxsize=4)
def token_bytes_function(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> Callable[[int], bytes]:
    """Return a function that returns the bytes that a token stands for, of a tokenizer of `num_tokens` tokens. Those of
    one token may be no whole characters."""
    added = {number: token.content.encode() for number, token in tokenizer.added_tokens_decoder.items()}
    decode = _decode_function(tokenizer, False)
    kind = tokenizer.backend_tokenizer.decoder.__getstate__() if _has_decoder(tokenizer) else b""
    is_byte_level, has_spaces = b'"ByteLevel"' in kind, "\u2581".encode() in kind or b"Metaspace" in kind
    falls_back = b'"ByteFallback"' in kind
    to_byte = {character: byte for byte, character in bytes_to_unicode().items()} if is_byte_level else {}

    def of(token: int) -> bytes:
        if token in added:
            return added[token]
        piece = tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return b""
        if is_byte_level and all(character in to_byte for character in piece):
            return bytes(to_byte[character] for character in piece)
        if falls_back and (found := _BYTE.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        return piece.replace("\u2581", " ").encode() if has_spaces or falls_back else decode([token]).encode()

    return of


def _has_decoder(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.is_fast and tokenizer.backend_tokenizer.decoder is not None


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """Return the text that every token adds to those before it, special ones included. A character of several tokens
    counts to the last of them."""
    return [text for text, _ in TokenTexts(tokenizer).read(token_ids, ends=True)]


def with_decoded_tokens(entry: dict[int, Logprob], tokenizer: PreTrainedTokenizerBase) -> dict[int, Logprob]:
    """Return the same log-probabilities, each with the text of its token alone ("" for ids beyond the tokenizer's)."""
    decode = _decode_function(tokenizer, False)
    size = len(tokenizer)
    return {i: replace(logprob, decoded_token=decode([i]) if i < size else "") for i, logprob in entry.items()}


def _decode_function(tokenizer: PreTrainedTokenizerBase, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Decode ids without the clean-up of spaces that some checkpoints ask for: it would change text already given."""
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        return lambda ids: backend.decode(ids, skip_special_tokens=skip_special_tokens)
    options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
    return lambda ids: str(tokenizer.decode(ids, **options))
