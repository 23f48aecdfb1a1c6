"""What comes back for a request: text, token ids, log-probabilities, times and reuse counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from vllm_blend.prompt_html import MAX_SHOWN_TOKENS, prompt_html

_SHOWN_CHARACTERS = 60  # of a text in a repr


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token, its rank in the vocabulary (1 is best) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """Log-probabilities of many positions in a few lists, which costs Python's garbage collector less than dicts do.

    It reads like a list of dicts. The fields are vLLM's: position i has the entries `start_indices[i]` up to, but not
    including, `end_indices[i]` of the four lists below. A position without log-probabilities (the first one of a
    prompt) reads as an empty dict.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    @classmethod
    def from_positions(cls, positions: Iterable[dict[int, Logprob] | None]) -> FlatLogprobs:
        """Return the log-probabilities of a list of dicts."""
        flat = cls()
        for entry in positions:
            flat.start_indices.append(len(flat.token_ids))
            for token, logprob in (entry or {}).items():
                flat.token_ids.append(token)
                flat.logprobs.append(logprob.logprob)
                flat.ranks.append(logprob.rank)
                flat.decoded_tokens.append(logprob.decoded_token)
            flat.end_indices.append(len(flat.token_ids))
        return flat

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | FlatLogprobs:
        if isinstance(index, slice):
            return self.from_positions(self[position] for position in range(*index.indices(len(self))))
        return {
            self.token_ids[i]: Logprob(self.logprobs[i], self.ranks[i], self.decoded_tokens[i])
            for i in range(self.start_indices[index], self.end_indices[index])
        }


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    `finish_reason` is None while it runs; "stop" for end-of-sequence, a stop token or a stop string; "length" for
    max_tokens or a full context; "abort" on request; "error" when it failed alone. `stop_reason` is the stop token id
    or the stop string. `logprobs` holds a dict token id -> Logprob per output token, and `cumulative_logprob` their
    sum over the chosen tokens; both are None unless asked for. With `flat_logprobs`, log-probabilities are a
    `FlatLogprobs` in place of a list.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | FlatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None

    def __repr__(self) -> str:
        reason = "running" if self.finish_reason is None else self.finish_reason
        return f"CompletionOutput({self.index}: {_shorten(self.text)}, {len(self.token_ids)} tokens, {reason})"


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds since the epoch; None until they do.

    `arrival_time` is taken when a call such as `LLM.generate` begins, before anything is parsed, tokenized or waits.
    There are two times to the first token: `first_token_latency` counts from there, `time_in_prefill` from the first
    step that works on the request or encodes its chunks. With speculative decoding `spec_token_acceptance_counts` says,
    as in vLLM, how many steps decoded the request (the first number), and in how many of them the first draft token was
    accepted, the second, and so on.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    spec_token_acceptance_counts: list[int] | None = None

    @property
    def time_in_queue(self) -> float | None:
        """Return the seconds between arrival and the first step that worked on the request."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def first_token_latency(self) -> float | None:
        """Return the seconds between arrival and the first token: what a caller waits."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def time_in_prefill(self) -> float | None:
        """Return the seconds between the first step that worked on the request and its first token."""
        if self.first_token_time is None or self.first_scheduled_time is None:
            return None
        return self.first_token_time - self.first_scheduled_time


@dataclass(frozen=True)
class BlendStats:
    """How a chunked prompt was blended, in tokens: reused + exact + encoded + recomputed make up the prompt.

    `num_reused_tokens` are those whose KV was found and stayed as it was; of these, `num_exact_tokens` counts those
    that stood where they were encoded (a true prefix) apart. `num_encoded_tokens` are those of chunks of which nothing
    was found, so that their KV was computed for this prompt first and then used as it was; `num_recomputed_tokens`
    those that the model computed in the blend itself, again or for the first time. `retained`: the context was found as
    it had been blended for an earlier prompt, and only the suffix was computed. `num_merged_parts` counts the text
    parts of a chat that share a token with the text beside them: such a token is computed, and a part without a token
    of its own is no chunk. `token_kinds` has a letter for every token of the prompt: "r" reused, "e" exact, "n" (new)
    encoded, "c" (computed) recomputed.
    """

    selector: str
    num_reused_tokens: int
    num_recomputed_tokens: int
    num_exact_tokens: int
    num_chunks: int
    recompute_ratio: float  # as asked for
    retained: bool = False
    num_merged_parts: int = 0
    num_encoded_tokens: int = 0
    token_kinds: str = field(default="", repr=False)


@dataclass
class RequestOutput:
    """A request and what has been generated for it.

    `prompt` is the prompt's text: as it was given, or of a prompt in pieces (chunks) the whole: the joined pieces where
    all are text, otherwise what the token ids decode to. None for plain token ids that came without a text.
    `prompt_logprobs` has an entry per prompt token, None for the first. `num_cached_tokens` counts prompt tokens whose
    KV was found and used as it was, never what was computed for this prompt. `num_found_tokens` says where, and adds up
    to it: "prefix_cache" (pages of an exact prefix), "retained" (pages of a blended context), "device" or "host"
    (chunks in the memory of the chunk store), "disk", "remote" (chunks loaded for this prompt), "joined" (chunks that
    another prompt was having encoded when this one came: the time until then is waited for, and the work counts for the
    other one alone) or "old_kvs" (the hook). Of several completions (`n`), these are the first one's, while the
    engine's counters add up those of all. A request that failed alone has `error` set and outputs with finish_reason
    "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | FlatLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    blend: BlendStats | None = None
    error: str | None = None
    num_found_tokens: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The text of each of some tokens. It is no field: a copy or a pickle must not take a tokenizer along.
        self._split_text: Callable[[Sequence[int]], list[str]] | None = None

    def show_with(self, split_text: Callable[[Sequence[int]], list[str]]) -> None:
        """Have notebooks show the prompt's tokens by `split_text`, which returns the text of every token id."""
        self._split_text = split_text

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_split_text": None}

    def __repr__(self) -> str:
        cached = f" ({self.num_cached_tokens} cached)" if self.num_cached_tokens else ""
        failed = "" if self.error is None else f", error={_shorten(self.error)}"
        return (
            f"RequestOutput({self.request_id!r}: {len(self.prompt_token_ids)} prompt tokens{cached}, "
            f"outputs={self.outputs}{failed})"
        )

    def _repr_html_(self) -> str:
        """Return the prompt for a notebook, with reused and computed tokens in their colours."""
        blend, num_tokens, found = self.blend, len(self.prompt_token_ids), self.num_cached_tokens or 0
        if blend is not None:
            title, kinds = f"{num_tokens} prompt tokens, {blend.selector}", blend.token_kinds
        else:  # what was found is an exact prefix
            title, kinds = f"{num_tokens} prompt tokens", "e" * found + "c" * (num_tokens - found)
        if self._split_text is None:
            texts = [f"[{token}]" for token in self.prompt_token_ids[:MAX_SHOWN_TOKENS]]
        else:
            texts = self._split_text(self.prompt_token_ids[:MAX_SHOWN_TOKENS])
        answers = [(completion.text, completion.finish_reason or "running") for completion in self.outputs]
        return prompt_html(title, kinds, texts, [*answers, *([] if self.error is None else [(self.error, "error")])])


def _shorten(text: str) -> str:
    """Return the repr of a text, of a long one of its beginning."""
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…")
