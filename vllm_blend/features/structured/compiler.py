"""Compiles the forms of answers, keeps them, and refuses those that are wrong or would take too long."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from vllm_blend.features.structured import trial
from vllm_blend.features.structured.config import StructuredOutputsConfig
from vllm_blend.features.structured.grammar import grammar_text
from vllm_blend.features.structured.library import llguidance
from vllm_blend.features.structured.trials import Trials
from vllm_blend.features.structured.vocabulary import Vocabulary
from vllm_blend.structured_outputs import StructuredOutputsParams

KEPT_PROCESSES = 2  # in which forms are tried, while none is
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

    Any thread may use it, and several compile at a time; those that need the same form wait for the first of them.
    """

    config: StructuredOutputsConfig
    get_vocabulary: Callable[[], Vocabulary]
    num_compiled: int = 0
    num_found: int = 0
    _kept: OrderedDict[tuple[Vocabulary, str], _Compiled] = field(default_factory=OrderedDict, repr=False)
    _keeping: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _compiling: dict[tuple[Vocabulary, str], threading.Event] = field(default_factory=dict, repr=False)
    _making: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _idle: list[Trials] = field(default_factory=list, repr=False)

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
        while (found := self._find(vocabulary, key)) is None:
            with self._keeping:
                compiled = self._compiling.get((vocabulary, key))
                is_first = compiled is None
                if compiled is None:
                    compiled = self._compiling[vocabulary, key] = threading.Event()
            if not is_first:
                compiled.wait()
                continue
            try:
                found = self._compile(vocabulary, params)
                self._keep(vocabulary, key, found)
                break
            finally:
                with self._keeping:
                    del self._compiling[vocabulary, key]
                compiled.set()
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
        try:
            text = grammar_text(params, self.config)
        except ValueError as error:
            return _Compiled(None, _shorten(str(error)))
        # Elsewhere first: what hangs or crashes there never gets here.
        with self._borrowed_trials(vocabulary) as trials:
            grammar, wrong = trials.try_out(text, is_source=params.form == "grammar")
        if not wrong:
            with self._making:
                tokens = vocabulary.tokens  # made once
            matcher = trial.compile_grammar(llguidance(), tokens, grammar)
            matcher.compute_bitmask()  # what this finds out is known to the copies
            if not matcher.is_error():
                return _Compiled(matcher, None)
            wrong = matcher.get_error()
        return _Compiled(None, f"structured_outputs.{params.form} is refused: {_shorten(wrong)}")

    @contextmanager
    def _borrowed_trials(self, vocabulary: Vocabulary) -> Iterator[Trials]:
        """Lend a process to one thread. Processes are kept for the next forms, as long as the vocabulary stays."""
        with self._keeping:
            other = [each for each in self._idle if each.vocabulary is not vocabulary]
            self._idle = [each for each in self._idle if each.vocabulary is vocabulary]
            trials = self._idle.pop() if self._idle else Trials(vocabulary, self.config.compile_seconds)
        for each in other:
            each.close()
        try:
            yield trials
        finally:
            with self._keeping:
                is_kept = len(self._idle) < KEPT_PROCESSES
                if is_kept:
                    self._idle.append(trials)
            if not is_kept:
                trials.close()


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
