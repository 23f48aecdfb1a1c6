"""Log-probabilities as OpenAI's two endpoints write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm_blend.entrypoints.openai.protocol.chat import ChatLogprobs, TokenLogprob, TopLogprob
from vllm_blend.entrypoints.openai.protocol.completion import CompletionLogprobs
from vllm_blend.outputs import Logprob, RequestOutput

Entry = Mapping[int, Logprob]
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
    """Writes the log-probabilities of one completion, piece by piece: offsets go on from the piece before."""

    def __init__(self, as_ids: bool, decode: Callable[[int], str]) -> None:
        self._as_ids, self._decode, self._offset = as_ids, decode, 0

    def write(self, token_ids: Sequence[int], entries: Sequence[Entry | None]) -> CompletionLogprobs:
        """Return the log-probabilities of the next tokens. An entry is None for the first token of a prompt."""
        offsets, tokens, chosen, tops = [], [], [], []
        for token, entry in zip(token_ids, entries, strict=True):
            known = entry.get(token) if entry else None
            text = self._decode(token) if known is None else token_text(token, known, self._as_ids)
            offsets.append(self._offset)
            self._offset += len(text)
            tokens.append(text)
            chosen.append(None if known is None else finite(known.logprob))
            tops.append({token_text(i, each, self._as_ids): finite(each.logprob) for i, each in (entry or {}).items()})
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=chosen,
            tokens=tokens,
            top_logprobs=[top or None for top in tops],
        )


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[Entry], num_top: int, as_ids: bool) -> ChatLogprobs:
    """Return the log-probabilities of a message's tokens, with those of the `num_top` most likely ones."""
    content = []
    for token, entry in zip(token_ids, entries, strict=True):
        best = sorted(entry.items(), key=lambda item: -item[1].logprob)[:num_top]
        own = _token(token, entry[token], as_ids)
        content.append(
            TokenLogprob(
                token=own.token,
                logprob=own.logprob,
                bytes=own.bytes,
                top_logprobs=[_token(i, each, as_ids) for i, each in best],
            )
        )
    return ChatLogprobs(content=content)


def _token(token: int, logprob: Logprob, as_ids: bool) -> TopLogprob:
    text = token_text(token, logprob, as_ids)
    return TopLogprob(token=text, logprob=finite(logprob.logprob), bytes=list(text.encode("utf-8", "replace")))


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
