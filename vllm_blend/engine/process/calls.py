"""The methods of the engine that the server's process may call between two steps.

To add one, write a function of the engine and its arguments and list it in `CALLS`. Arguments are converted to the
types of the annotations. What is returned must be made of numbers, strings, lists and dicts; a function that has to
wait returns a `Future` of it instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from inspect import signature
from threading import Thread
from typing import Any, get_type_hints

import msgspec

from vllm_blend.engine.llm_engine import LLMEngine
from vllm_blend.inputs import ParsedPrompt
from vllm_blend.kv_store.owners import Owner


def get_metrics(engine: LLMEngine) -> list[tuple[str, str, float]]:
    """Return the kind, the name and the value of every metric."""
    return [(type(metric).__name__, metric.name, metric.value) for metric in engine.get_metrics()]


def reset_prefix_cache(engine: LLMEngine) -> None:
    engine.reset_prefix_cache()


def encode_chunks(engine: LLMEngine, parsed: ParsedPrompt, owner: Owner) -> Future[list[dict[str, Any]]]:
    """Have the chunks of a context (`prompt_parser.parse_context`) computed and stored for an owner while other
    requests go on, wherever they may stand in a prompt. The result has the `key` and `num_tokens` of each: their KV
    stays here."""
    _, ids = engine.composer.finder.identify(parsed, everywhere=True)
    done: Future[list[dict[str, Any]]] = Future()
    result = [{"key": chunk.key, "num_tokens": len(chunk.token_ids)} for chunk in ids]
    engine.begin_encoding(parsed, lambda: done.set_result(result), owner=owner)
    return done


def remove_chunks(engine: LLMEngine, keys: list[str]) -> None:
    """Remove stored chunks from every tier. Requests that run keep what they have."""
    for key in keys:
        engine.chunk_store.remove(key)


def retain_chunks(engine: LLMEngine, keys: list[str], level: int, seconds: float, owner: str) -> None:
    """Have chunks leave the memory of the chunk store after all of a lower level, for so many seconds, within the quota
    of their owner."""
    for key in keys:
        engine.chunk_store.retain(key, level, seconds, owner)


def flush(engine: LLMEngine) -> Future[bool]:
    """Wait until the chunk store has written everything below its memory; the result is whether it has."""
    done: Future[bool] = Future()
    store = engine.chunk_store
    Thread(target=_settle, args=(done, store.flush), daemon=True, name="flush").start()
    return done


CALLS: dict[str, Callable[..., Any]] = {
    "encode_chunks": encode_chunks,
    "flush": flush,
    "get_metrics": get_metrics,
    "remove_chunks": remove_chunks,
    "reset_prefix_cache": reset_prefix_cache,
    "retain_chunks": retain_chunks,
}


def check_call(method: str, arguments: Sequence[Any]) -> None:
    """Raise ValueError or TypeError for a method that is not in the table, or another number of arguments."""
    if method not in CALLS:
        raise ValueError(f"{method!r} is no method that can be called: use one of {', '.join(sorted(CALLS))}")
    expected = len(signature(CALLS[method]).parameters) - 1
    if len(arguments) != expected:
        raise TypeError(f"{method} takes {expected} arguments, not {len(arguments)}")


def run_call(engine: LLMEngine, method: str, arguments: Sequence[Any]) -> Any:
    """Run a method of the table, and return its result or a `Future` of it. Raises what the method raises."""
    function = CALLS[method]
    hints = get_type_hints(function)
    names = list(signature(function).parameters)[1:]
    converted = [msgspec.convert(value, hints[name]) for name, value in zip(names, arguments, strict=True)]
    return function(engine, *converted)


def _settle(done: Future[Any], work: Callable[[], Any]) -> None:
    """Give a future the result of `work`, or its error."""
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
