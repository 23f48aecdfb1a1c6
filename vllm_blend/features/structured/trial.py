"""Compiles and tries grammars in a process of its own, which may hang, crash or run out of memory without harm.

It is run by its path, and imports nothing of the package: it is to start quickly. It reads a line of JSON with a
vocabulary, answers with a line, and then reads lines of {"grammar": text, "is_source": whether it may be GBNF} and
answers each with {"grammar": text as `compile_grammar` takes it, "error": what is wrong, empty if nothing is}.
"""

import json
import os
import random
import sys
import threading
from typing import Any

STACK_BYTES = 2 << 20  # no more than any thread of an engine has: a grammar that is deeper than this is not for them
MEMORY_BYTES = 6 << 30
NICENESS = 5  # steps of the engine go before: it gets a third of what they get of a core
NOTHING = "no text has this form"
# What the library says of some grammars, in words that mean something to those who wrote them.
REWORDED = {
    "NoExtensionBias": NOTHING,
    "oneOf constraints are not supported": "the choices of oneOf overlap: give anyOf, or other choices",
}
STEPS = 48  # tokens of a random answer: grammars whose masks take long show it early


def compile_grammar(library: Any, vocabulary: Any, grammar: str) -> Any:
    """Return a matcher of the library: in the error state if the grammar is wrong or above its limits."""
    limits = library.LLParserLimits(max_lexer_states=50_000, precompute_large_lexemes=False, verbose_errors=False)
    return library.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)


def read_vocabulary(library: Any, text: str, size: int, eos: list[int]) -> Any:
    """Return the library's vocabulary of `size` tokens from the JSON text of a tokenizer."""
    return library.LLTokenizer(text, n_vocab=size, eos_token=eos)


def read_source(library: Any, text: str) -> str:
    """Return a grammar that a user wrote as `compile_grammar` takes it. Raises ValueError if it cannot be read."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(library.LLMatcher.grammar_from_lark(any_to_lark(text)))
    except RecursionError:
        raise ValueError("it is nested too deeply: use rules for its parts") from None
    except Exception as error:  # the converter of GBNF raises bare exceptions
        raise ValueError(f"it cannot be read: {error}") from None


def try_grammar(library: Any, vocabulary: Any, grammar: str) -> str:
    """Return what is wrong with a grammar, empty if it allows a random answer's first tokens."""
    matcher = compile_grammar(library, vocabulary, grammar)
    chance = random.Random(0)
    for step in range(STEPS):
        if matcher.is_error():
            break
        mask = bytearray(matcher.compute_bitmask())
        if matcher.is_error():
            break
        for token in vocabulary.eos_tokens:
            mask[token // 8] &= ~(1 << token % 8)
        used = [index for index, byte in enumerate(mask) if byte]
        if not used:
            return NOTHING if step == 0 and not matcher.is_accepting() else ""
        index = chance.choice(used)
        matcher.consume_token(8 * index + chance.choice([bit for bit in range(8) if mask[index] >> bit & 1]))
    said = str(matcher.get_error())
    return next((words for theirs, words in REWORDED.items() if theirs in said), said)


def main() -> None:
    """Answer lines until there are no more."""
    import llguidance

    if sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = read_vocabulary(llguidance, **json.loads(sys.stdin.readline()))
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        grammar, error = asked["grammar"], ""
        try:
            grammar = read_source(llguidance, grammar) if asked["is_source"] else grammar
            error = try_grammar(llguidance, vocabulary, grammar)
        except Exception as raised:
            error = str(raised) or type(raised).__name__
        print(json.dumps({"grammar": grammar, "error": error}), flush=True)


if __name__ == "__main__":
    os.nice(NICENESS)  # for the threads that are started from here on as well
    threading.stack_size(STACK_BYTES)
    worker = threading.Thread(target=main)
    worker.start()
    worker.join()
