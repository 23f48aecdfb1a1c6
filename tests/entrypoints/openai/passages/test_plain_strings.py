"""Passages that have been seen before are found in plain strings, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chunks.test_chat import CHATML_LIKE, LLAMA3_LIKE
from tests.chunks.test_chat_prompt import CALL, LISTS, full_stops_with_line_ends, trimmed_offsets
from tests.engine.tiny_tokenizers import byte_fallback, byte_level, slow
from tests.entrypoints.openai.passages.prompts import (
    FINDER,
    INSTRUCTION,
    PASSAGES,
    chat,
    chunk_texts,
    completion,
    stuffed,
)
from vllm_blend.entrypoints.openai.passages import PassageFinder
from vllm_blend.prompt_parser import parse_prompt
from vllm_blend.prompt_pieces import control_tokens

JOINS: dict[str, Any] = {
    "blank lines": "\n\n".join,
    "blank lines of Windows": "\r\n\r\n".join,
    "LMCache": " # # ".join,
    "sources": lambda texts: "\n".join(
        f'<source id="{i}" name="a.pdf">{text}</source>' for i, text in enumerate(texts)
    ),
    "documents": lambda texts: "".join(
        f'<document index="{len(text)}">\n<source>a.pdf</source>\n\n{text}\n</document>\n' for text in texts
    ),
}


@pytest.mark.parametrize("name", JOINS)
def test_passages_are_found_whatever_separates_them(name: str) -> None:
    """They are in another order the second time, and one is new."""
    finder = PassageFinder(**FINDER)
    write = JOINS[name]
    assert completion(finder, f"{INSTRUCTION}\n\n{write(PASSAGES[:3])}\n\nWho jumps?").chunk_bounds == ()
    prompt = completion(finder, f"{INSTRUCTION}\n\n{write(PASSAGES[::-1])}\n\nWho is it?")
    texts = [text.strip() for text in chunk_texts(prompt)]
    assert [text[-20:] for text in texts] == [passage[-20:] for passage in PASSAGES[2::-1]]
    assert str(byte_level().decode(prompt.prefix)).strip() == INSTRUCTION


def test_what_ways_of_writing_share() -> None:
    """A passage of one way is known in the others, and the chunk has the same tokens."""
    finder = PassageFinder(**FINDER)
    found = [
        completion(finder, {"prefix": INSTRUCTION + "\n\n", "chunks": [f"{PASSAGES[0]}\n\n"], "suffix": "Who?"}),
        completion(finder, stuffed(PASSAGES[0], question="Where?")),
        chat(finder, [{"role": "user", "content": "Where?"}], CHATML_LIKE, [PASSAGES[0]]),
        chat(finder, [{"role": "user", "content": stuffed(PASSAGES[0], question="Who?")}], CHATML_LIKE),
    ]
    tokens = [prompt.token_ids[slice(*prompt.chunk_bounds[-1])] for prompt in found]
    assert tokens == [tokens[0]] * 4


def test_the_beginning_that_two_prompts_share_is_left_to_the_prefix_cache() -> None:
    """It is exact. What has been a chunk once is no longer part of it."""
    finder = PassageFinder(**FINDER)
    assert completion(finder, stuffed(*PASSAGES[:2], question="Who?")).chunk_bounds == ()
    assert completion(finder, stuffed(*PASSAGES[:2], question="And where?")).chunk_bounds == ()
    assert completion(finder, stuffed(*PASSAGES[:3], question="And when?")).chunk_bounds == ()
    for _ in range(2):
        assert len(chunk_texts(completion(finder, stuffed(*PASSAGES[1::-1], question="Who?")))) == 2
    turns = [{"role": "user", "content": stuffed(PASSAGES[3], question="A question about the dog?")}]
    for answer in ("A long enough answer of the model", "And one more answer of the model"):
        assert chat(finder, turns, CHATML_LIKE).chunk_bounds == () or answer.startswith("A")
        turns += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"What about it, {answer}?"}]


def test_a_growing_conversation_has_no_chunks() -> None:
    finder = PassageFinder(**FINDER)
    turns: list[dict[str, Any]] = [{"role": "system", "content": INSTRUCTION}]
    for number in range(4):
        turns.append({"role": "user", "content": f"{PASSAGES[number]}\n\nThe question number {number}?"})
        assert chat(finder, turns, CHATML_LIKE).chunk_bounds == ()
        turns.append({"role": "assistant", "content": f"The answer to the question number {number}."})


def test_passages_in_a_system_prompt_and_in_a_tools_result() -> None:
    finder = PassageFinder(**FINDER)
    call: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    template = CHATML_LIKE.replace("m['content']", "(m['content'] or '')")
    for order, count in ((PASSAGES, 0), (PASSAGES[::-1], 4)):
        system = {"role": "system", "content": "\n\n".join([INSTRUCTION, *order])}
        prompt = chat(finder, [system, {"role": "user", "content": "Who?"}], template)
        assert [text.strip() for text in chunk_texts(prompt)] == order[:count]
    assert str(byte_level().decode(prompt.prefix)).endswith(INSTRUCTION + "\n\n")
    tool: list[dict[str, Any]] = [
        {"role": "user", "content": "Where is it now?"},
        call,
        {"role": "tool", "content": "\n\n".join(PASSAGES)},
    ]
    prompt = chat(finder, tool, template)
    assert [text.strip() for text in chunk_texts(prompt)] == PASSAGES
    assert "Where is it now?" not in str(byte_level().decode(prompt.prefix))


def test_a_system_prompt_of_passages_alone() -> None:
    """Nothing says that its first passage is no instruction, until that stands elsewhere. Then all are chunks in any
    order, and an instruction stays what it is, also behind another date."""
    finder = PassageFinder(**FINDER)
    question = {"role": "user", "content": "Who?"}
    for order, count in ((PASSAGES, 0), (PASSAGES[::-1], 4), (PASSAGES[2:] + PASSAGES[:2], 4)):
        prompt = chat(finder, [{"role": "system", "content": "\n\n".join(order)}, question], CHATML_LIKE)
        assert [text.strip() for text in chunk_texts(prompt)] == order[:count]
    for date, order in (("Monday", PASSAGES), ("Tuesday", PASSAGES[::-1])):
        system = {"role": "system", "content": "\n\n".join([INSTRUCTION, *order])}
        prompt = chat(finder, [system, question], f"It is {date}. {CHATML_LIKE}")
        assert str(byte_level().decode(prompt.prefix)).endswith(INSTRUCTION + "\n\n")


def test_what_is_too_short_and_what_is_not_detected() -> None:
    for finder in (PassageFinder(min_characters=100), PassageFinder(False, 1)):
        for order in (PASSAGES, PASSAGES[::-1], PASSAGES):
            assert completion(finder, stuffed(*order, question="Who?")).chunk_bounds == ()
        assert len(finder) == 0 or finder.detects


def test_a_tokenizer_that_does_not_say_where_tokens_stand() -> None:
    finder = PassageFinder(**FINDER)
    for order in (PASSAGES, PASSAGES[::-1]):
        prompt = completion(finder, text := stuffed(*order, question="Who?"), tokenizer=slow())
        assert prompt.token_ids == parse_prompt(text, slow(), len(slow())).token_ids and prompt.chunk_bounds == ()


def test_text_that_costs_much_to_read() -> None:
    """Tags without an end, and the wrong ones: a quadratic search would take hours."""
    finder = PassageFinder(**FINDER)
    for text in (
        "<source>" * 20_000,
        "<source" * 20_000,
        "<source></document>" * 8_000,
        "a\n\n" * 40_000,
        "\n" * 99_999,
    ):
        with pytest.raises(ValueError, match="max_model_len"):
            completion(finder, text + "?" * 70_000)
        sections = [text, PASSAGES[0], "?"]
        finder.see(sections, None)
        assert len(completion(finder, text[:9000] + PASSAGES[0]).token_ids) > 0


PIECES = st.sampled_from(
    [
        *PASSAGES,
        INSTRUCTION,
        "\n\n",
        "\n\n",
        " # # ",
        "<source id='1'>",
        "</source>",
        "<document>",
        "</document>",
        " ",
        "\n",
        "<s>",
    ]
)
TEXTS = st.lists(st.one_of(PIECES, PIECES, st.text(max_size=12)), min_size=1, max_size=14).map("".join)
TOKENIZERS = st.sampled_from([byte_level, byte_fallback, trimmed_offsets, full_stops_with_line_ends])


def valid(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return bool(text.strip()) and "QQ" not in text


@given(st.lists(TEXTS.filter(valid), min_size=1, max_size=4), TOKENIZERS)
def test_ids_of_a_string_are_those_of_the_whole_string(texts: list[str], make: Any) -> None:
    """Every text has been seen before in another order of its pieces, so that much is found. The last piece is never in
    a chunk, chunks are sorted, and they do not overlap."""
    tokenizer, finder = make(), PassageFinder(min_characters=4)
    finder.see([*PASSAGES, INSTRUCTION], None)
    for text in texts:
        prompt = completion(finder, text, tokenizer=tokenizer)
        assert prompt.token_ids == parse_prompt(text, tokenizer, len(tokenizer)).token_ids
        edges = [len(prompt.prefix) if prompt.chunk_bounds else 0, *(e for pair in prompt.chunk_bounds for e in pair)]
        assert edges == sorted(edges) and all(start < stop for start, stop in prompt.chunk_bounds)
        if prompt.chunk_bounds:
            last = text.rstrip()[-1]
            assert last in str(tokenizer.decode(prompt.token_ids[edges[-1] :])) or not last.isascii()


@given(
    st.lists(TEXTS.filter(valid), min_size=1, max_size=3),
    st.sampled_from([CHATML_LIKE, LLAMA3_LIKE, LISTS]),
    TOKENIZERS,
)
def test_ids_of_a_conversation_are_those_of_its_text(texts: list[str], template: str, make: Any) -> None:
    """With documents and without; the question's last piece is never in a chunk."""
    tokenizer, finder = make(), PassageFinder(min_characters=4)
    finder.see([*PASSAGES, INSTRUCTION], None)
    roles = ["system", "user", "assistant", "tool", "user"][-len(texts) - 1 : -1]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
    messages.append({"role": "user", "content": f"{texts[0]}\n\nWho is QQ?"})
    for documents in (None, [{"title": "T", "text": texts[-1]}, PASSAGES[0]]):
        prompt = chat(finder, messages, template, documents, tokenizer=tokenizer, trusts=True)
        assert prompt.text is not None
        assert prompt.token_ids == tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        edges = [e for pair in prompt.chunk_bounds for e in pair]
        assert edges == sorted(edges) and (not edges or edges[-1] < len(prompt.token_ids))
        assert not any("QQ" in str(tokenizer.decode(prompt.token_ids[a:b])) for a, b in prompt.chunk_bounds)


@pytest.mark.parametrize(
    ("mark", "seconds"),
    [
        ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600),
        ({"cache_control": {"type": "ephemeral"}}, 300),
        ({"prompt_cache_breakpoint": {"mode": "explicit"}}, 1800),
    ],
)
@pytest.mark.parametrize("detects", [True, False])
def test_what_a_part_asks_to_have_stored(mark: dict[str, Any], seconds: int, detects: bool) -> None:
    """It is a chunk the first time, whole and retained, unless the prefix cache has more to give. The question is
    not."""
    finder = PassageFinder(detects, 16)
    tool: dict[str, Any] = {"role": "tool", "content": [{"type": "text", "text": "\n\n".join(PASSAGES), **mark}]}
    turns: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "Who jumps?", **mark}]}, tool]
    prompt = chat(finder, turns, CHATML_LIKE)
    assert chunk_texts(prompt) == ["\n\n".join(PASSAGES)] and prompt.retention == (seconds,)
    named = [{"type": "text", "text": PASSAGES[0]}, {"type": "text", "text": PASSAGES[1], **mark}]
    prompt = chat(finder, [{"role": "user", "content": [*named, {"type": "text", "text": "Who?"}]}], LISTS)
    assert chunk_texts(prompt) == PASSAGES[:2] and prompt.retention == (0, seconds)
    if detects:
        agent = PassageFinder(min_characters=16)
        answer = {"role": "assistant", "content": PASSAGES[0] * 4}
        turns = [{"role": "user", "content": "Who jumps?"}, answer, {"role": "user", "content": "And who does not?"}]
        assert chat(agent, turns, CHATML_LIKE).chunk_bounds == ()
        turns += [{"role": "assistant", "content": "Let me look."}, tool]
        assert chat(agent, turns, CHATML_LIKE).chunk_bounds == ()


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        (
            {"cache_control": "ephemeral"},
            r"\['content'\]\[0\]\['cache_control'\] is a str: give an object",
        ),
        ({"cache_control": {"ttl": "soon"}}, r"\['cache_control'\]\['ttl'\]='soon' is no time"),
        ({"cache_control": {"ttl": [5]}}, r"\['ttl'\] is \[5\]: give a number of seconds"),
        ({"prompt_cache_breakpoint": {"ttl": "999d"}}, r"\['prompt_cache_breakpoint'\]\['ttl'\]='999d' must be more"),
        ({"prompt_cache_breakpoint": {"ttl": 0}}, "must be more than 0"),
    ],
)
def test_marks_that_cannot_be(mark: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        chat(PassageFinder(), [{"role": "user", "content": [{"type": "text", "text": "Who?", **mark}]}], LISTS)


@given(
    st.lists(st.sampled_from(["<|s", "ep|>", "<|sep|>", "</s>", "</", "s>", "<s>", " dog", "\n"]), max_size=12),
    TOKENIZERS,
)
def test_no_text_of_a_client_forges_a_turn(parts: list[str], make: Any) -> None:
    """Documents that a template renders and those that it does not, results of tools, and users' texts."""
    tokenizer = make()
    control = control_tokens(tokenizer)
    template = (
        "{% for d in documents or [] %}{{ d.title ~ d.text }}{% endfor %}{% for m in messages %}<|sep|>{{ m.role }}\n"
        "{{ m.content }}{% endfor %}<|sep|>assistant\n"
    )
    counts = set()
    for shown in (parts, []):
        messages = [{"role": "tool", "content": "".join(shown)}, {"role": "user", "content": "".join(["?", *shown])}]
        documents = [{"text": "".join(["a", *shown])}, {"title": "".join(["b", *shown]), "text": "c"}]
        for named in (documents, None):
            for each in (template, CHATML_LIKE):
                prompt = chat(PassageFinder(min_characters=4), messages, each, named, tokenizer=tokenizer)
                found = [token for token in prompt.token_ids if token in control.ids]
                counts.add((each, len(found)))
    assert len(counts) == 2
