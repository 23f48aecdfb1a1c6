"""The messages between the server's process and the engine process: msgpack, each a tagged array.

Requests are known by a number that the server's process counts up; their ids, which users choose, may come again.
"""

from __future__ import annotations

import builtins
import numbers
from typing import Any, TypeAlias

import msgspec

from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.owners import ANYONE, Owner
from vllm_blend.outputs import BlendStats, Logprob, RequestMetrics
from vllm_blend.sampling_params import SamplingParams

PIECE = 16  # completions in one piece of news that has log-probabilities

WireLogprobs: TypeAlias = dict[int, tuple[float, int | None]]  # token -> log-probability and rank


class Add(msgspec.Struct, array_like=True, tag=True):
    """A new request. Its parameters have no stop strings and ask for no text: the server's process sees to these."""

    number: int
    request_id: str
    parsed: ParsedPrompt
    params: SamplingParams
    arrival_time: float
    priority: int
    owner: Owner = ANYONE
    call: str = ""


class Abort(msgspec.Struct, array_like=True, tag=True):
    """Requests whose outputs are not wanted any more."""

    numbers: list[int]


class Stop(msgspec.Struct, array_like=True, tag=True):
    """A completion that has ended with a stop string."""

    number: int
    index: int


class Call(msgspec.Struct, array_like=True, tag=True):
    """A method from `calls.py`, run between two steps."""

    number: int
    method: str
    arguments: list[Any]


class Tokens(msgspec.Struct, array_like=True, gc=False):
    """What is new of one completion. `finish_reason` and `stop_reason` belong to the last token, if any is new."""

    index: int
    token_ids: list[int]
    logprobs: list[WireLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None


class Facts(msgspec.Struct, array_like=True):
    """What is known of a request as a whole: sent with its first tokens, and when it has ended."""

    metrics: RequestMetrics
    num_cached_tokens: int
    found_in: dict[str, int] | None
    blend: BlendStats | None
    error: str | None = None
    token_ids: list[int] | None = None  # of the prompt, if its chunks were put into another order
    prompt_logprobs: list[WireLogprobs | None] | None = None


class Delta(msgspec.Struct, array_like=True):
    """What is new of a request. `time` is when its last token was read, in seconds since the epoch."""

    number: int
    tokens: list[Tokens]
    time: float
    facts: Facts | None = None

    @property
    def num_logprobs(self) -> int:
        return sum(len(entry) for tokens in self.tokens for entry in tokens.logprobs or ())

    def pieces(self, size: int = PIECE) -> list[Delta]:
        """Return the same news of `size` completions each, if there are log-probabilities: making these takes time."""
        if len(self.tokens) <= size or self.tokens[0].logprobs is None:
            return [self]
        return [
            Delta(self.number, self.tokens[at : at + size], self.time, None if at else self.facts)
            for at in range(0, len(self.tokens), size)
        ]


class Outputs(msgspec.Struct, array_like=True, tag=True):
    """What a step has given: what there is to say of some requests, and one token more for each of `singles`.

    Most requests get a token of a step and nothing else. Two lists of numbers take a tenth of the time that a `Delta`
    for each of these takes to make, send and read.
    """

    deltas: list[Delta]
    singles: list[int] = []  # numbers of requests of one completion; none is among `deltas`
    token_ids: list[int] = []  # of these, in their order
    time: float = 0.0  # when those tokens were read, in seconds since the epoch


class Error(msgspec.Struct, array_like=True):
    """An error as the other process can raise it: its first built-in class, its text, and where it came from."""

    kind: str
    message: str
    trace: str = ""


class Refused(msgspec.Struct, array_like=True, tag=True):
    """A request that the engine did not take."""

    number: int
    error: Error
    retry_after: float | None = None  # seconds, if it may be sent again: too many wait


class Answer(msgspec.Struct, array_like=True, tag=True):
    """What a called method returned, or raised."""

    number: int
    result: Any
    error: Error | None = None


class Ready(msgspec.Struct, array_like=True, tag=True):
    """The engine is loaded."""

    max_model_len: int
    dtype: str
    default_sampling_settings: dict[str, Any]


class Beat(msgspec.Struct, array_like=True, tag=True):
    """The engine process lives, and its loop has come round so often."""

    num_turns: int


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The engine process ends because of an error: while it loads, or because its steps fail."""

    error: Error


ToEngine: TypeAlias = Add | Abort | Stop | Call
FromEngine: TypeAlias = Ready | Beat | Outputs | Refused | Answer | Failed


def encode_other(value: Any) -> Any:
    """Return NumPy's numbers, and strings of a class of their own, as Python's, for the encoder. Raises TypeError for
    anything else."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to another process")


def new_encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=encode_other)


def to_wire(entry: dict[int, Logprob]) -> WireLogprobs:
    return {token: (logprob.logprob, logprob.rank) for token, logprob in entry.items()}


def from_wire(entry: WireLogprobs) -> dict[int, Logprob]:
    return {token: Logprob(logprob, rank) for token, (logprob, rank) in entry.items()}


def describe_error(error: BaseException, trace: str = "") -> Error:
    """Return an error for the other process. Classes of libraries become the built-in class that they derive from."""
    kinds = (kind.__name__ for kind in type(error).__mro__ if getattr(builtins, kind.__name__, None) is kind)
    name = next(kinds)
    builtin = type(error).__name__ == name
    return Error(name, str(error) if builtin else f"{type(error).__name__}: {error}", trace)


def raisable(error: Error) -> Exception:
    """Return the error that another process has described. An exit of that process is a RuntimeError here."""
    kind = getattr(builtins, error.kind, RuntimeError)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = RuntimeError
    try:
        raised = kind(error.message)
    except TypeError:  # such as UnicodeDecodeError, which takes five arguments
        raised = ValueError(error.message) if issubclass(kind, ValueError) else RuntimeError(error.message)
    if error.trace:
        raised.add_note(f"In the engine process:\n{error.trace}")
    return raised
