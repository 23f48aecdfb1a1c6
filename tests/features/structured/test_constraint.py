"""Masks of an answer and of guesses that follow it, however a large batch is split."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.engines import TINY_VOCABULARY
from tests.engine.tiny_tokenizers import byte_level
from vllm_blend import StructuredOutputsParams
from vllm_blend.features.structured.compiler import GrammarCompiler
from vllm_blend.features.structured.config import StructuredOutputsConfig
from vllm_blend.features.structured.constraint import FollowedAnswer, GrammarConstraint
from vllm_blend.features.structured.library import llguidance
from vllm_blend.features.structured.vocabulary import Vocabulary
from vllm_blend.ops.token_masks import words_for

A, B, C, X = (byte_level().get_vocab()[letter] for letter in "abcx")
EOS = 1


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    vocabulary = Vocabulary.from_tokenizer(byte_level(), TINY_VOCABULARY, (EOS,))
    return GrammarCompiler(StructuredOutputsConfig(compile_seconds=120.0), lambda: vocabulary)


def rows_of(compiler: GrammarCompiler, guesses: list[int]) -> list[GrammarConstraint]:
    """Return the constraints of an answer that begins, and of each guess behind the ones before it."""
    matcher, vocabulary = compiler.matcher(StructuredOutputsParams(regex="abc"))
    first = GrammarConstraint(FollowedAnswer(matcher, vocabulary, []), llguidance().LLExecutor())
    return [first.after(guesses[:count]) for count in range(len(guesses) + 1)]


def allowed(rows: list[GrammarConstraint]) -> list[list[int]]:
    """Return the tokens that the mask of each row allows."""
    words = np.full((len(rows), words_for(TINY_VOCABULARY)), -1, np.int32)
    assert rows[0].fill_masks(rows, words) == {}
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :TINY_VOCABULARY]
    return [np.flatnonzero(row).tolist() for row in bits]


def test_a_split_batch_has_the_same_masks(compiler: GrammarCompiler) -> None:
    rows = rows_of(compiler, [A, B, C])
    whole = allowed(rows)
    assert [A in whole[0], B in whole[1], C in whole[2], whole[3]] == [True, True, True, [EOS]]
    for _ in range(2):  # guesses leave no trace
        assert [*allowed(rows[:1]), *allowed(rows[1:3]), *allowed(rows[3:])] == whole
        assert allowed(rows) == whole


def test_text_that_ends_answers_is_text_before_the_end() -> None:
    vocabulary = Vocabulary.from_tokenizer(byte_level(), TINY_VOCABULARY, (EOS, A, X))
    rows = rows_of(GrammarCompiler(StructuredOutputsConfig(compile_seconds=120.0), lambda: vocabulary), [A, B, C])
    first, *inner, last = allowed(rows)
    assert A in first and not {EOS, X} & set(first) and not any({EOS, A, X} & set(row) for row in inner)
    assert last == sorted([EOS, A, X])
    rows[0].answer.output_token_ids.append(A)
    assert not rows[0].has_ended()
    rows[0].answer.output_token_ids += [B, C, X]
    assert rows[0].has_ended() and allowed(rows[:1]) == [last]


def test_rows_behind_a_forbidden_guess_do_not_count_and_leave_no_trace(compiler: GrammarCompiler) -> None:
    rows = rows_of(compiler, [A, X, C])
    everything = list(range(TINY_VOCABULARY))
    first, second = allowed(rows[:2])
    assert allowed(rows[2:]) == [everything] * 2
    assert allowed(rows) == [first, second, everything, everything]
    rows[0].answer.output_token_ids.append(A)  # which now counts for good
    assert allowed(rows[:1]) == [second]
