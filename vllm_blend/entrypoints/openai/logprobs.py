"""Log-probabilities as OpenAI's two endpoints write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_blend.entrypoints.openai.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from vllm_blend.entrypoints.openai.protocol.completion import CompletionLogprobs
from vllm_blend.outputs import Logprob, RequestOutput

Entry = Mapping[int, Logprob]
_UNDECODABLE = "\ufffd"
_LEAST = -9999.0  # for log-probabilities of minus infinity, which JSON has no number for


def token_text(token: int, logprob: Logprob, as_ids: bool) -> str:
    return f"token_id:{token}" if as_ids else logprob.decoded_token or ""


def finite(value: float) -> float:
    return max(value, _LEAST)


def num_values(outputs: Sequence[RequestOutput]) -> int:
    """Return roughly how many log-probabilities, and tokens, the answer made of these outputs has."""
    total = 0
    for output in outputs:
        total += len(output.prompt_token_ids)
        for completion in output.outputs:
            total += len(completion.token_ids)
            for entries in (output.prompt_logprobs, completion.logprobs):
                if entries:
                    total += len(entries) * len(entries[-1] or ())
    return total


class CompletionLogprobsWriter:
    """Writes the log-probabilities of one completion, piece by piece: offsets go on from the piece before.

    The tokens join to the text: a character of several tokens stands with the last of them, and tokens that the text
    leaves out are empty.
    """

    def __init__(self, as_ids: bool, bytes_of: Callable[[int], bytes]) -> None:
        self._as_ids, self._bytes_of, self._offset = as_ids, bytes_of, 0

    def write(
        self, token_ids: Sequence[int], texts: Sequence[str], entries: Sequence[Entry | None]
    ) -> CompletionLogprobs:
        """Return the log-probabilities of the next tokens. An entry is None for the first token of a prompt."""
        offsets, tokens, chosen, tops = [], [], [], []
        for token, text, entry in zip(token_ids, texts, entries, strict=True):
            known = entry.get(token) if entry else None
            offsets.append(self._offset)
            self._offset += len(text)
            tokens.append(f"token_id:{token}" if self._as_ids else text)
            chosen.append(None if known is None else finite(known.logprob))
            tops.append({self._key(i, each): finite(each.logprob) for i, each in (entry or {}).items()})
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=chosen,
            tokens=tokens,
            top_logprobs=[top or None for top in tops],
        )

    def _key(self, token: int, logprob: Logprob) -> str:
        """Return a token's text alone, or its bytes, as OpenAI writes them, where that is no text."""
        text = token_text(token, logprob, self._as_ids)
        if self._as_ids or _UNDECODABLE not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes_of(token))


def chat_logprobs(
    token_ids: Sequence[int],
    texts: Sequence[tuple[str, bytes]],
    entries: Sequence[Entry],
    num_top: int,
    as_ids: bool,
    bytes_of: Callable[[int], bytes],
) -> ChatLogprobs:
    """Return the log-probabilities of a message's tokens, with those of the `num_top` most likely ones. `texts` has the
    text and the bytes that each token adds to the message, which `bytes_of` returns for a token alone."""
    content = []
    for token, (text, own), entry in zip(token_ids, texts, entries, strict=True):
        best = sorted(entry.items(), key=lambda item: -item[1].logprob)[:num_top]
        tops = [
            TopLogprob(token=token_text(i, each, as_ids), logprob=finite(each.logprob), bytes=list(bytes_of(i)))
            for i, each in best
        ]
        shown = f"token_id:{token}" if as_ids else text
        logprob = finite(entry[token].logprob)
        content.append(TokenLogprob(token=shown, logprob=logprob, bytes=list(own), top_logprobs=tops))
    return ChatLogprobs(content=content)


def prompt_logprobs(entries: Sequence[Entry | None] | None) -> list[dict[str, Any] | None] | None:
    """Return the log-probabilities of a prompt as vLLM's field `prompt_logprobs` has them."""
    if entries is None:
        return None
    return [
        None
        if not entry
        else {
            str(token): {"logprob": finite(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
            for token, each in entry.items()
        }
        for entry in entries
    ]
