"""Compiles the forms of answers, keeps them, and refuses those that are wrong or would take too long."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vllm_blend.features.structured import trial
from vllm_blend.features.structured.config import StructuredOutputsConfig
from vllm_blend.features.structured.grammar import grammar_text
from vllm_blend.features.structured.library import llguidance
from vllm_blend.features.structured.trials import Trials
from vllm_blend.features.structured.vocabulary import Vocabulary
from vllm_blend.structured_outputs import StructuredOutputsParams

SHOWN = 300  # characters of what the library says of a grammar: it may quote all of it


@dataclass(frozen=True)
class _Compiled:
    """A matcher that has seen no token, or the reason why there is none."""

    matcher: Any
    error: str | None


@dataclass(eq=False)
class GrammarCompiler:
    """Compiled forms, the least recently used ones forgotten. `get_vocabulary` returns the same object
    as long as the tokenizer stays the same.

    Any thread may use it. A thread that compiles holds up those that compile, too, but none that finds what it needs.
    """

    config: StructuredOutputsConfig
    get_vocabulary: Callable[[], Vocabulary]
    num_compiled: int = 0
    num_found: int = 0
    _kept: OrderedDict[tuple[Vocabulary, str], _Compiled] = field(default_factory=OrderedDict, repr=False)
    _keeping: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _compiling: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _trials: Trials | None = field(default=None, repr=False)

    def is_known(self, params: StructuredOutputsParams) -> bool:
        """Return at once whether a form has been compiled or refused."""
        try:
            vocabulary, key = self.get_vocabulary(), _key(params)
        except ValueError:  # which is said where the form is used, at once
            return True
        with self._keeping:
            return (vocabulary, key) in self._kept

    def prepare(self, params: StructuredOutputsParams) -> None:
        """Compile a form, if it is new. An error in it is not raised here, but where the form is used."""
        with suppress(ValueError):
            self.matcher(params)

    def matcher(self, params: StructuredOutputsParams) -> tuple[Any, Vocabulary]:
        """Return a new matcher for one answer, and the vocabulary that it is for.

        Raises ValueError naming the field for a form that is wrong or takes too long, and without the library.
        """
        llguidance()
        vocabulary, key = self.get_vocabulary(), _key(params)
        found = self._find(vocabulary, key)
        if found is None:
            with self._compiling:
                found = self._find(vocabulary, key)  # another thread may just have compiled it
                if found is None:
                    found = self._compile(vocabulary, params)
                    self._keep(vocabulary, key, found)
        if found.error is not None:
            raise ValueError(found.error)
        return found.matcher.deep_copy(), vocabulary

    def _find(self, vocabulary: Vocabulary, key: str) -> _Compiled | None:
        with self._keeping:
            found = self._kept.get((vocabulary, key))
            if found is not None:
                self._kept.move_to_end((vocabulary, key))
                self.num_found += 1
            return found

    def _keep(self, vocabulary: Vocabulary, key: str, compiled: _Compiled) -> None:
        with self._keeping:
            self._kept[vocabulary, key] = compiled
            self.num_compiled += 1
            while len(self._kept) > self.config.cache_size:
                self._kept.popitem(last=False)

    def _compile(self, vocabulary: Vocabulary, params: StructuredOutputsParams) -> _Compiled:
        if self._trials is None or self._trials.vocabulary is not vocabulary:
            self._trials = Trials(vocabulary, self.config.compile_seconds)
        try:
            text = grammar_text(params, self.config)
        except ValueError as error:
            return _Compiled(None, _shorten(str(error)))
        # Elsewhere first: what hangs or crashes there never gets here.
        grammar, wrong = self._trials.try_out(text, is_source=params.form == "grammar")
        if not wrong:
            matcher = trial.compile_grammar(llguidance(), vocabulary.tokens, grammar)
            matcher.compute_bitmask()  # what this finds out is known to the copies
            if not matcher.is_error():
                return _Compiled(matcher, None)
            wrong = matcher.get_error()
        return _Compiled(None, f"structured_outputs.{params.form} is refused: {_shorten(wrong)}")


def _key(params: StructuredOutputsParams) -> str:
    """Return a text that two forms share if they are alike. Raises ValueError if there is none."""
    try:
        return json.dumps(vars(params))
    except RecursionError:
        raise ValueError(f"structured_outputs.{params.form} is nested too deeply: flatten it, or use $ref") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"structured_outputs.{params.form} is no valid JSON: {error}") from None


def _shorten(error: str) -> str:
    text = " ".join(error.replace("<non-verbose/>", "").split())
    return text if len(text) <= SHOWN else text[:SHOWN] + " ..."
