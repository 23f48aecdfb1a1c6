from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.engine.tiny_tokenizers import byte_fallback, byte_level, slow
from vllm_blend.detokenizer import Detokenizer, with_decoded_tokens
from vllm_blend.outputs import Logprob
from vllm_blend.sampling_params import SamplingParams

pytestmark = pytest.mark.cpu_only

MakeTokenizer = Callable[[], PreTrainedTokenizerBase]

TOKENIZERS: list[MakeTokenizer] = [byte_level, byte_fallback, slow]
unicode_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def plain_decode(tokenizer: PreTrainedTokenizerBase, ids: list[int], skip: bool = True) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def run(detokenizer: Detokenizer, ids: list[int]) -> str | None:
    """Feed tokens until a stop string is hit; every streamed text must be a prefix of the next and of the end."""
    streamed, hit = "", None
    for token in ids:
        hit = detokenizer.append(token)
        now = detokenizer.stream_text(finished=False)
        assert now.startswith(streamed)
        streamed = now
        if hit is not None:
            break
    assert detokenizer.stream_text(finished=True) == detokenizer.text
    assert detokenizer.text.startswith(streamed)
    return hit


@settings(max_examples=150, deadline=None)
@given(prompt=unicode_text, output=unicode_text)
@pytest.mark.parametrize("make", TOKENIZERS)
def test_text_is_what_a_whole_decode_puts_after_the_prompt(make: MakeTokenizer, prompt: str, output: str) -> None:
    tokenizer = make()
    prompt_ids, ids = encode(tokenizer, prompt), encode(tokenizer, output)
    detokenizer = Detokenizer(tokenizer, SamplingParams(), prompt_ids)
    run(detokenizer, ids)
    before = plain_decode(tokenizer, prompt_ids)
    assert before + detokenizer.text == plain_decode(tokenizer, prompt_ids + ids)
    if make is not byte_fallback:  # there, an output decoded alone loses its leading space
        assert detokenizer.text == plain_decode(tokenizer, ids)


@pytest.mark.parametrize("skip", [True, False])
def test_arbitrary_tokens_equal_a_whole_decode(skip: bool) -> None:
    """Random ids are mostly broken UTF-8 with special tokens between: nothing may be lost, doubled or raised."""
    tokenizer = byte_level()
    rng = random.Random(0)
    for _ in range(150):
        ids = [rng.randrange(rng.choice([20, 270, 420])) for _ in range(60)]
        detokenizer = Detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip), encode(tokenizer, "The dog"))
        run(detokenizer, ids)
        assert detokenizer.text == plain_decode(tokenizer, ids, skip)


@pytest.mark.parametrize("make", TOKENIZERS)
def test_split_character_is_held_back_until_it_is_whole(make: MakeTokenizer) -> None:
    tokenizer = make()
    ids = encode(tokenizer, "a😀")
    detokenizer = Detokenizer(tokenizer, SamplingParams(), encode(tokenizer, "The"))
    for token in ids[:-1]:
        detokenizer.append(token)
        assert "\ufffd" not in detokenizer.stream_text(finished=False)
        assert "😀" not in detokenizer.text
    detokenizer.append(ids[-1])
    assert detokenizer.stream_text(finished=False).endswith("😀")


def test_unfinished_character_is_flushed_at_the_end() -> None:
    tokenizer = byte_level()
    ids = encode(tokenizer, "中")[:-1]
    detokenizer = Detokenizer(tokenizer, SamplingParams(), encode(tokenizer, "The"))
    run(detokenizer, ids)
    assert detokenizer.stream_text(finished=False) == ""
    assert detokenizer.text == detokenizer.stream_text(finished=True) == "\ufffd"


def test_output_completes_a_character_that_the_prompt_began() -> None:
    tokenizer = byte_level()
    ids = encode(tokenizer, "中")
    detokenizer = Detokenizer(tokenizer, SamplingParams(), encode(tokenizer, "The ") + ids[:1])
    run(detokenizer, ids[1:] + encode(tokenizer, " dog"))
    assert detokenizer.text == "中 dog"


def test_undecodable_output_does_not_pile_up() -> None:
    """An endless run of broken bytes is shown after a few tokens, and the window it is decoded in stays short."""
    tokenizer = byte_level()
    lone = encode(tokenizer, "中")[0]
    detokenizer = Detokenizer(tokenizer, SamplingParams(), encode(tokenizer, "The"))
    for count in range(1, 200):
        detokenizer.append(lone)
        assert detokenizer.text == "\ufffd" * count
        assert len(detokenizer.stream_text(finished=False)) >= count - 8
        assert len(detokenizer._decoder._ids) <= 16  # type: ignore[union-attr]


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    """Models pad their vocabulary; random weights do generate such ids."""
    for make in TOKENIZERS:
        tokenizer = make()
        ids = encode(tokenizer, "dog go")
        detokenizer = Detokenizer(tokenizer, SamplingParams(), encode(tokenizer, "The"))
        run(detokenizer, [len(tokenizer) + 5, *ids[:2], len(tokenizer), *ids[2:]])
        without = Detokenizer(tokenizer, SamplingParams(), encode(tokenizer, "The"))
        run(without, ids)
        assert detokenizer.text == without.text != ""


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("include", [False, True])
def test_stop_string_over_several_tokens(make: MakeTokenizer, include: bool) -> None:
    tokenizer = make()
    ids = encode(tokenizer, "the dog. Where did it go?")
    params = SamplingParams(stop=["e di", "zebra"], include_stop_str_in_output=include)
    detokenizer = Detokenizer(tokenizer, params, encode(tokenizer, "The"))
    assert run(detokenizer, ids) == "e di"
    assert detokenizer.text.strip() == ("the dog. Where di" if include else "the dog. Wher")


@settings(max_examples=200, deadline=None)
@given(
    output=st.text("abc", min_size=1, max_size=20),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 4), min_size=20, max_size=20),
    include=st.booleans(),
)
def test_stop_does_not_depend_on_how_text_is_cut_into_tokens(
    output: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    """Reference: read character by character until some stop string is the end of the text."""
    tokenizer = words_tokenizer()
    expected, hit = output, None
    for end in range(1, len(output) + 1):
        matches = [stop for stop in stops if output[:end].endswith(stop)]
        if matches:
            hit = max(matches, key=len)
            expected = output[:end] if include else output[: end - len(hit)]
            break
    pieces, start = [], 0
    for size in sizes:
        pieces.append(output[start : start + size])
        start += size
    ids = word_ids(tokenizer, *filter(None, pieces))
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    detokenizer = Detokenizer(tokenizer, params, [0])
    assert run(detokenizer, ids) == hit
    assert detokenizer.text == expected


def word_ids(tokenizer: PreTrainedTokenizerBase, *words: str) -> list[int]:
    vocab = tokenizer.get_vocab()
    return [vocab[word] for word in words]


@lru_cache
def words_tokenizer() -> PreTrainedTokenizerBase:
    """Every string of 1 to 4 letters a, b, c is a token."""
    words = [""]
    for _ in range(4):
        words += [word + letter for word in words for letter in "abc" if word + letter not in words]
    tokenizer = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["?", *dict.fromkeys(words[1:])])}, unk_token="?")
    )
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_stop_string_within_min_tokens_is_passed_over() -> None:
    tokenizer = words_tokenizer()
    ids = word_ids(tokenizer, "a", "b", "a", "b", "c")
    for min_tokens, text in [(0, ""), (1, ""), (2, "ab"), (3, "ab"), (4, "ababc")]:
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop="ab", min_tokens=min_tokens), [0])
        run(detokenizer, ids)
        assert detokenizer.text == text


MARKED = st.lists(st.sampled_from(["(", ")", "(", ")", "a", "b", "ab", " "]), max_size=9)


@settings(max_examples=300, deadline=None)
@given(
    parts=MARKED, stops=st.lists(st.sampled_from(["a", "ab", "b", "("]), min_size=1, unique=True), opened=st.booleans()
)
def test_stop_strings_in_reasoning_are_passed_over(parts: list[str], stops: list[str], opened: bool) -> None:
    """Reference: take the reasoning away, with the white space around its marks, and look in the rest."""
    text = "".join(parts)
    rest = text
    if opened or text.lstrip().startswith("("):
        _, mark, behind = text.partition(")")
        rest = behind.lstrip() if mark else ""
    ends = {rest.find(stop) + len(stop): len(stop) for stop in sorted(stops, key=len) if stop in rest}
    at = min(ends, default=len(rest))
    expected = text[: len(text) - len(rest) + at - ends.get(at, 0)]

    tokenizer = marks_tokenizer()
    marks = ("" if opened else "(", ")")
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops, reasoning_marks=marks), [0])
    streamed = ""
    for part in parts:
        stop = detokenizer.append(tokenizer.get_vocab()[part])
        shown = detokenizer.stream_text(finished=stop is not None)
        assert shown.startswith(streamed)
        streamed = shown
        if stop is not None:
            assert stop in stops and detokenizer.text == expected
            return
    is_open_end = not text.strip()  # nothing has come yet
    assert detokenizer.stream_text(finished=True) == text
    assert not ends or is_open_end, "a stop string was missed"


@lru_cache
def marks_tokenizer() -> PreTrainedTokenizerBase:
    vocab = {word: number for number, word in enumerate(["?", "(", ")", "a", "b", "ab", " "])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_stream_holds_back_what_may_become_a_stop_string() -> None:
    tokenizer = words_tokenizer()
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["abca", "cc"]), [0])
    seen = []
    for token in word_ids(tokenizer, "b", "ab", "c", "b"):
        detokenizer.append(token)
        seen.append(detokenizer.stream_text(finished=False))
    assert seen == ["b", "b", "b", "babcb"]


@pytest.mark.parametrize("include", [False, True])
def test_token_that_ends_the_output_is_text_only_on_request(include: bool) -> None:
    tokenizer = byte_level()
    params = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=include)
    detokenizer = Detokenizer(tokenizer, params, encode(tokenizer, "The"))
    for token in encode(tokenizer, " dog"):
        detokenizer.append(token)
    assert detokenizer.append(tokenizer.eos_token_id, ends=True) is None
    assert detokenizer.text == (" dog</s>" if include else " dog")


@pytest.mark.parametrize(("spaces", "text"), [(True, "a <x> <y> b"), (False, "a <x><y> b")])
def test_spaces_between_special_tokens(spaces: bool, text: str) -> None:
    backend = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2}, unk_token="?"))
    backend.add_special_tokens(["<x>", "<y>"])  # no decoder: tokens are joined with spaces
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    params = SamplingParams(skip_special_tokens=False, spaces_between_special_tokens=spaces)
    detokenizer = Detokenizer(tokenizer, params, [0])
    run(detokenizer, [1, 3, 4, 2])
    assert detokenizer.text.lstrip() == text


@pytest.mark.parametrize("detokenize", [False, True])
def test_without_detokenization_or_tokenizer_there_is_no_text(detokenize: bool) -> None:
    tokenizer = None if detokenize else byte_level()
    detokenizer = Detokenizer(tokenizer, SamplingParams(detokenize=detokenize), [1])
    assert detokenizer.append(5) is None
    assert detokenizer.text == detokenizer.stream_text(finished=True) == ""


def test_decoded_tokens_of_logprobs() -> None:
    tokenizer = byte_level()
    dog = encode(tokenizer, " dog")[0]
    entry = {dog: Logprob(-0.5, 1), tokenizer.eos_token_id: Logprob(-2.0, 2), 9999: Logprob(-3.0, 3)}
    assert with_decoded_tokens(entry, tokenizer) == {
        dog: Logprob(-0.5, 1, " dog"),
        tokenizer.eos_token_id: Logprob(-2.0, 2, "</s>"),
        9999: Logprob(-3.0, 3, ""),
    }


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 419), max_size=40), prompt=st.lists(st.integers(0, 419), max_size=4))
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("make", TOKENIZERS)
def test_remembered_pieces_are_those_of_a_new_decoder(
    make: MakeTokenizer, skip: bool, ids: list[int], prompt: list[int]
) -> None:
    tokenizer, params = make(), SamplingParams(skip_special_tokens=skip)
    for _ in range(2):  # the second time, every piece that may be remembered is
        known, fresh = Detokenizer(tokenizer, params, prompt), Detokenizer(tokenizer, params, prompt)
        assert known._decoder is not None and fresh._decoder is not None
        for token in ids:
            fresh._decoder._is_whole = False  # decodes every token
            assert known._decoder.step(token) == fresh._decoder.step(token)
            assert known.text == fresh.text
