"""`documents` are chunks, whatever the template does with them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.chunks.test_chat import CHATML_LIKE, LLAMA3_LIKE
from tests.chunks.test_chat_prompt import LISTS, parts
from tests.entrypoints.openai.passages.prompts import FINDER, PASSAGES, chat, chunk_texts
from vllm_blend.checks import closest
from vllm_blend.entrypoints.openai.passages import PassageFinder, parse_documents
from vllm_blend.entrypoints.openai.passages.documents import _is_misspelt
from vllm_blend.entrypoints.openai.passages.stored import StoredPassage

SYSTEM = {"role": "system", "content": "Answer."}
QUESTION = {"role": "user", "content": "Who jumps?"}
DOCUMENTS: list[Any] = [
    {"title": "The fox", "text": PASSAGES[0], "score": 0.9},
    f" {PASSAGES[1]}\n",
    {"id": "doc-3", "data": {"title": "Code", "snippet": PASSAGES[2]}, "score": 0.1},
]
READS = (
    "{% for m in messages %}{% if m.role == 'user' %}{% for d in documents or [] %}[{{ loop.index }}] {{ d.title }}\n"
    "{{ d.KEY }}\n{% endfor %}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)


@pytest.mark.parametrize("template", [CHATML_LIKE, LLAMA3_LIKE, LISTS], ids=["chatml", "llama3", "lists"])
def test_a_template_that_does_not_read_documents(template: str) -> None:
    """They stand before what the user asked last, each with its title and a blank line, in any order the same chunk."""
    turns = [SYSTEM, QUESTION, {"role": "assistant", "content": "The fox."}, {"role": "user", "content": "Over what?"}]
    shown = [f"The fox\n{PASSAGES[0]}\n\n", f"{PASSAGES[1]}\n\n", f"Code\n{PASSAGES[2]}\n\n"]
    found = []
    for documents, texts in ((DOCUMENTS, shown), (DOCUMENTS[::-1], shown[::-1])):
        prompt = chat(PassageFinder(), turns, template, documents)
        assert prompt.text is not None and "".join(texts) + "Over what?" in prompt.text
        assert chunk_texts(prompt) == texts
        found.append({tuple(prompt.token_ids[a:b]) for a, b in prompt.chunk_bounds})
    assert found[0] == found[1]


@pytest.mark.parametrize("key", ["text", "snippet"])
def test_a_template_that_reads_documents(key: str) -> None:
    """It says where and how; the chunk is the text. If it shows a document without its text, the default holds for
    all."""
    documents: list[Any] = [{"title": "One", "text": PASSAGES[0]}, {"title": "Two", "text": PASSAGES[3]}]
    prompt = chat(PassageFinder(), [SYSTEM, QUESTION], READS.replace("KEY", key), documents)
    assert prompt.text is not None and prompt.text.count(PASSAGES[0]) == prompt.text.count(PASSAGES[3]) == 1
    if key == "text":
        assert f"[2] Two\n{PASSAGES[3]}\nuser: Who jumps?" in prompt.text
        assert chunk_texts(prompt) == [PASSAGES[0], PASSAGES[3]]
    else:
        assert chunk_texts(prompt) == [f"One\n{PASSAGES[0]}\n\n", f"Two\n{PASSAGES[3]}\n\n"]
    snippets = [{"title": d["title"], "snippet": d["text"]} for d in documents]
    prompt = chat(PassageFinder(), [SYSTEM, QUESTION], READS.replace("KEY", key), snippets)
    assert (chunk_texts(prompt) == [PASSAGES[0], PASSAGES[3]]) == (key == "snippet")


@pytest.mark.parametrize("separator", ["\n", "\n\n", ""])
def test_documents_are_parts_of_a_template_that_takes_parts(separator: str) -> None:
    """What it writes before the question stands behind the documents. They have a blank line of their own if it would
    write them into one line."""
    begins = "{% if loop.last %}Question: {% endif %}{{ part['text'] }}"
    template = LISTS.replace("{{ part['text'] }}", begins + separator)
    end = "" if separator else "\n\n"
    shown = [f"The fox\n{PASSAGES[0]}{end}", f"{PASSAGES[1]}{end}", f"Code\n{PASSAGES[2]}{end}"]
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    question = {"role": "user", "content": [{"type": "text", "text": "Over what?", **mark}]}
    prompt = chat(PassageFinder(), [SYSTEM, QUESTION, question], template, DOCUMENTS)
    assert chunk_texts(prompt) == shown and prompt.retention == ()
    assert prompt.text is not None and prompt.text.count("Question: ") == 3
    same = chat(PassageFinder(), [SYSTEM, QUESTION, parts(*shown, "Over what?")], template)
    assert (same.token_ids, same.chunk_bounds) == (prompt.token_ids, prompt.chunk_bounds)


def test_documents_beside_text_parts() -> None:
    messages = [SYSTEM, parts(PASSAGES[0], PASSAGES[1], "Who?")]
    prompt = chat(PassageFinder(), messages, LISTS, [PASSAGES[2]])
    assert chunk_texts(prompt) == [f"{PASSAGES[2]}\n\n", PASSAGES[0], PASSAGES[1]]


@pytest.mark.parametrize("template", [CHATML_LIKE, LLAMA3_LIKE, LISTS])
def test_documents_that_continue_a_page(template: str) -> None:
    """Also if other chunks stand before them. `blend.continues` says the same, of text parts too."""
    pages: list[Any] = [{"text": PASSAGES[0]}, PASSAGES[1], {"text": PASSAGES[2], "continues": 0}]
    earlier = [{"role": "user", "content": f"{PASSAGES[3]}\n\nWho?"}, {"role": "assistant", "content": "The dog."}]
    finder, messages = PassageFinder(**FINDER), [SYSTEM, *earlier, QUESTION]
    for _ in range(3):
        prompt = chat(finder, messages, template, pages)
    assert len(chunk_texts(prompt)) == 4 and prompt.continues == (None, None, None, 1)
    plain: list[Any] = [{"text": PASSAGES[0]}, *PASSAGES[1:3]]
    assert chat(finder, messages, template, plain, continues=[None, None, 0]) == prompt
    assert chat(finder, messages, template, plain).continues == ()
    unsaid = chat(finder, messages, template, pages, continues=[None] * 3)
    assert unsaid.continues == (None,) * len(unsaid.chunk_bounds)
    assert chat(PassageFinder(), [QUESTION], READS.replace("KEY", "text"), pages).continues == (None, None, 0)


def test_text_parts_that_continue_a_page() -> None:
    turns = [parts(PASSAGES[0], PASSAGES[1], "Read."), QUESTION]
    prompt = chat(PassageFinder(), turns, LISTS, [PASSAGES[2]], continues=[None, None, 1, None])
    assert [text.strip() for text in chunk_texts(prompt)] == [PASSAGES[0], PASSAGES[1], "Read.", PASSAGES[2]]
    assert prompt.continues == (None, 0, None, None)
    message = r"blend.continues\[1\] is 0, but that passage stands behind it in the prompt"
    with pytest.raises(ValueError, match=message):
        chat(PassageFinder(), turns, LISTS, [PASSAGES[2]], continues=[None, 0, None, None])


def test_a_template_that_turns_documents_round_has_no_earlier_ones() -> None:
    """The error names the field that says so."""
    template = READS.replace("KEY", "text").replace("in documents or []", "in (documents or []) | reverse")
    pages: list[Any] = [PASSAGES[0], {"text": PASSAGES[1], "continues": 0}]
    with pytest.raises(ValueError, match=r"^documents\[1\].continues is 0, but that passage stands behind it"):
        chat(PassageFinder(), [QUESTION], template, pages)
    with pytest.raises(ValueError, match=r"^blend.continues\[1\] is 0, but that passage stands behind it"):
        chat(PassageFinder(), [QUESTION], template, PASSAGES[:2], continues=[None, 0])


def test_a_template_that_changes_the_texts_leaves_a_plain_prompt() -> None:
    """Documents are in it all the same."""
    upper = "{% for m in messages %}{{ m.content | upper }}{% endfor %}:"
    prompt = chat(PassageFinder(), [SYSTEM, QUESTION], upper, DOCUMENTS)
    assert (prompt.chunk_bounds, prompt.num_unfound_parts) == ((), 3)
    assert prompt.text is not None and PASSAGES[0].upper() in prompt.text


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ("text", "documents is a str: give a list"),
        ([7], r"documents\[0\] is an int: give a string, or an object"),
        (["a", " "], r"documents\[1\] has no text"),
        ([{"title": "T"}], r"documents\[0\] has no text"),
        ([{"text": 7}], r"documents\[0\].text is an int"),
        ([{"text": "a", "title": 7}], r"documents\[0\].title is an int"),
        ([{"text": "a", "continues": 0}], r"documents\[0\].continues is 0: .* none stands before this one"),
        (["a", {"text": "a", "continues": 1}], r"documents\[1\].continues is 1: give the number .* from 0 to 0"),
        (["a", {"data": {"text": "a", "continues": "0"}}], r"documents\[1\].continues is '0': give the number"),
        (["a", {"text": "a", "continues": True}], r"documents\[1\].continues is True: give the number"),
        ([{"text": "a\ud800"}], r"documents\[0\].text holds half of a surrogate pair"),
        (
            [{"text": "a", "titel": "T"}],
            r"documents\[0\] has the key 'titel', which nothing reads: did you mean 'title'",
        ),
        (["a", {"text": "a", "score": 3, "tittle": "T"}], r"documents\[1\] has the key 'tittle'.*mean 'title'"),
        ([{"id": "1", "data": {"text": "a", "Title": "T"}}], r"documents\[0\] has the key 'Title'.*mean 'title'"),
        ([{"id": "chunk-7"}], r"documents\[0\].id='chunk-7' names a stored passage, but this server keeps none"),
    ],
)
def test_errors_name_the_document(documents: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        parse_documents(documents)


def test_other_keys_are_for_the_template() -> None:
    """Those that resemble none, or stand beside what they resemble, or that the template shows."""
    parse_documents([{"text": "a", "_score": 3, "url": "u", "store": 5, "title": "T", "titles": 2}])
    shows = ("{{ d.titles }}", "{{ d | tojson }}", "{% for key, value in d.items() %}{{ value }}{% endfor %}")
    for template in (f"{{% for d in documents %}}{show}{{% endfor %}}" for show in shows):
        assert parse_documents([{"text": "a", "titles": 3}], None, template)[0].fields["titles"] == 3


def test_a_score_is_not_shown() -> None:
    """A template that shows all of a document would make another text of each score, and find no KV for it."""
    template = READS.replace("{{ d.KEY }}", "{{ d | tojson }}")
    scored = [{"text": PASSAGES[0], "score": score} for score in (0.9, 0.1, "high")]
    texts = {chat(PassageFinder(), [QUESTION], template, [each]).text for each in scored}
    assert texts == {chat(PassageFinder(), [QUESTION], template, [PASSAGES[0]]).text}


def test_documents_without_a_place() -> None:
    with pytest.raises(ValueError, match="documents need a user's message"):
        chat(PassageFinder(), [SYSTEM], CHATML_LIKE, DOCUMENTS)


def test_fields_without_a_text_of_their_own_and_stored_passages() -> None:
    [document] = parse_documents([{"id": "1", "data": {"name": "Fox", "age": 3, "title": "T"}}])
    assert (document.text, document.title) == ("name: Fox\nage: 3", "T")
    stored = StoredPassage("chunk-1", None, "Its text\n", "Its title", 2, (), 0, 0)
    [document] = parse_documents([{"id": "chunk-1", "score": 2}], {"chunk-1": stored}.__getitem__)
    assert (document.text, document.title) == ("Its text", "Its title")


def test_keys_that_are_nearly_title_are_those_that_look_alike() -> None:
    """The quick test of a key finds the same ones as comparing it with "title" does."""
    rng = random.Random(0)
    edited = ["title"[:i] + "title"[i + 1 :] for i in range(5)] + ["title"[:i] + "x" + "title"[i:] for i in range(6)]
    random_keys = ["".join(rng.choices("titleTx_", k=rng.randint(1, 8))) for _ in range(3000)]
    for key in {*edited, *random_keys, "tilte", "TITEL", "titel", "tiitle"} - {"title"}:
        low = key.lower()
        alike = closest(low, ["title"], 0.88) is not None or low in ("ittle", "ttile", "tilte", "titel")
        assert _is_misspelt(key) == (key[0].isalpha() and alike), key
