"""A chat template stands around the chunks as it would around the whole text."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chunks.llms import TINY, chunked_llm
from tests.engine.engines import greedy
from vllm_blend import ChunkedLLM
from vllm_blend.entrypoints.composition_preview import preview as preview_of

LLAMA3_LIKE = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|sep|>' + m['role'] + '\n\n' + m['content'] | trim + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|sep|>assistant\n\n' }}{% endif %}"
)
CHATML_LIKE = (
    "{% for m in messages %}{{ '<|sep|>' + m['role'] + '\n' + m['content'] + '<|sep|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|sep|>assistant\n' }}{% endif %}"
)
SYSTEM = "Answer the question."
PASSAGES = ["The quick brown fox jumps over the lazy dog.\n\n", "Where did the dog go?\n\n", "naïve café, 敏捷的\n\n"]
QUESTION = "def f(x):\n    return x"


def whole(chunked: ChunkedLLM, system: str | None, user: str, template: str) -> list[int]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    ids: Any = chunked.get_tokenizer().apply_chat_template(
        [*messages, {"role": "user", "content": user}],
        chat_template=template,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert isinstance(ids, list)
    return ids


@pytest.mark.parametrize("template", [LLAMA3_LIKE, CHATML_LIKE], ids=["llama3", "chatml"])
@pytest.mark.parametrize("system", [None, SYSTEM], ids=["no system", "system"])
def test_ids_equal_those_of_the_whole_conversation(template: str, system: str | None) -> None:
    with chunked_llm(chat_template=template) as chunked:
        system_id = None if system is None else chunked.register_chunk(system, "system_prompt").id
        for passages in (PASSAGES, PASSAGES[::-1], PASSAGES[:1], []):
            chunks = [chunked.register_chunk(passage).id for passage in passages]
            arguments: dict[str, Any] = {"query": QUESTION}
            made = chunked.compose(system_id, chunks, **arguments)
            assert made.token_ids == whole(chunked, system, "".join(passages) + QUESTION, template)
            preview = chunked.preview_composition(system_id, chunks, **arguments)
            assert preview.template_seam is None and preview.token_ids == made.token_ids
            query = chunked.register_chunk(QUESTION, "query")
            assert chunked.compose(system_id, chunks, query.id).token_ids == made.token_ids


def test_the_system_prompt_is_exact_where_it_stands() -> None:
    with chunked_llm(chat_template=CHATML_LIKE) as chunked:
        system = chunked.register_chunk(SYSTEM, "system_prompt")
        chunk = chunked.register_chunk(PASSAGES[0])
        assert system.context_token_ids == tuple(chunked.get_tokenizer().encode("<|sep|>system\n"))
        preview = chunked.preview_composition(system.id, [chunk.id], query=QUESTION)
        assert [(part.chunk_id, part.exact) for part in preview.parts] == [
            (None, False),
            (system.id, True),
            (None, False),
            (chunk.id, False),
            (None, False),
            (None, False),
        ]
        output = chunked.generate_from_chunks(
            system.id, [chunk.id], query=QUESTION, sampling_params=greedy(3), mode="reuse"
        )
        assert output.blend is not None and output.blend.num_exact_tokens == len(system)
        assert output.blend.num_reused_tokens == len(chunk)
        assert output.blend.num_recomputed_tokens == preview.num_tokens - len(system) - len(chunk)


def test_a_token_over_a_seam_is_that_of_the_whole_text_and_belongs_to_no_chunk() -> None:
    with chunked_llm(chat_template=CHATML_LIKE) as chunked:
        first, second = "The quick bro", "wn fox"
        chunks = [chunked.register_chunk(text).id for text in (first, second)]
        made = chunked.compose(None, chunks, query=QUESTION)
        expected = whole(chunked, None, first + second + QUESTION, CHATML_LIKE)
        assert made.token_ids == expected
        preview = chunked.preview_composition(None, chunks, query=QUESTION)
        assert preview.template_seam is None
        decode = chunked.get_tokenizer().decode
        stored = [decode(expected[part.start : part.stop]) for part in preview.parts if part.chunk_id]
        assert stored == ["The quick", " fox"], "'bro' and 'wn' make one token"
        asked: dict[str, Any] = {"query": QUESTION, "sampling_params": greedy(3), "mode": "reuse", "retain": False}
        first_time, second_time = (chunked.generate_from_chunks(None, chunks, **asked).blend for _ in range(2))
        assert first_time is not None and first_time.num_encoded_tokens == 3
        assert second_time is not None and second_time.num_reused_tokens == 3
        store = chunked.llm_engine.chunk_store
        keys = [part.chunk_id for part in preview.parts if part.chunk_id]
        assert all(store.bytes_of(key) for key in keys)
        for chunk in chunks:
            chunked.delete_chunk(chunk)
        assert not any(store.bytes_of(key) for key in keys), "a chunk's KV of other places is deleted with it"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"use_chat_template": True}, "the tokenizer has no chat template"),
        ({"chat_template": "{{ messages[0]['content'] | upper }}"}, "does not show"),
        ({"chat_template": "{{ messages[0]['content'] * 2 }}"}, "does not show"),
    ],
)
def test_templates_that_cannot_be_split(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChunkedLLM(TINY, **arguments)


def test_whether_there_is_a_template_is_for_the_constructor_to_know() -> None:
    with chunked_llm() as chunked:
        for call in (chunked.generate_from_chunks, chunked.preview_composition, chunked.generate_and_retain_output):
            with pytest.raises(TypeError, match=r"use_chat_template holds for all prompts: .* ChunkedLLM\(model, use_"):
                call(query="Go", use_chat_template=True)
        with pytest.raises(TypeError, match="chat_template holds for all prompts"):
            chunked.batch_generate_from_chunks([{"query": "Go", "chat_template": CHATML_LIKE}])


def test_a_template_may_refuse_a_system_prompt() -> None:
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    with chunked_llm(chat_template=refuses + "{{ messages[0]['content'] }}:") as chunked:
        assert chunked.compose(query="Go").token_ids
        with pytest.raises(
            ValueError, match=r"does not take a system prompt .*\(No system role\): .* leave system_chunk"
        ):
            chunked.register_chunk(SYSTEM, "system_prompt")


def test_a_template_that_strips_is_shown() -> None:
    """Llama 3's template strips messages: the ids are still those of the chunks as they were registered."""
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}\n{% endfor %}[assistant]"
    with chunked_llm(chat_template=template) as chunked:
        for text, strips in ((" The quick fox.\n", True), ("The quick fox.\n", False)):
            chunk = chunked.register_chunk(text).id
            seam = chunked.preview_composition(None, [chunk], query=QUESTION).template_seam
            same = chunked.compose(None, [chunk], query=QUESTION).token_ids == whole(
                chunked, None, text + QUESTION, template
            )
            assert (seam is not None, same) == (strips, not strips)


def test_previews_tell_what_runs() -> None:
    with chunked_llm() as chunked:
        system = chunked.register_chunk(SYSTEM, "system_prompt", name="system")
        chunk = chunked.register_chunk(PASSAGES[0])
        arguments: dict[str, Any] = {"query": QUESTION, "selector": "first_tokens", "recompute_ratio": 0.5}
        preview = chunked.preview_composition("system", [chunk.id], **arguments)
        output = chunked.generate_from_chunks("system", [chunk.id], sampling_params=greedy(2), **arguments)
        assert output.prompt_token_ids == preview.token_ids and output.blend is not None
        assert preview.num_computed_tokens == output.blend.num_recomputed_tokens and not preview.is_retained
        assert preview.text == SYSTEM + PASSAGES[0] + QUESTION and preview.fits and preview.max_model_len == 96
        bounds = [(part.start, part.stop) for part in preview.parts]
        assert bounds[0] == (0, len(system)) and bounds[1] == (len(system), len(system) + len(chunk))
        assert preview.parts[1].num_bytes == len(chunk) * chunked.llm_engine.composer.bytes_per_token
        after = chunked.preview_composition("system", [chunk.id], **arguments)
        assert after.is_retained and after.num_computed_tokens == bounds[2][1] - bounds[2][0]
        exact = chunked.preview_composition("system", [chunk.id], query=QUESTION, mode="exact")
        assert exact.num_computed_tokens == exact.num_tokens
        arguments = {"query": QUESTION, "mode": "exact"}
        for _ in range(2):
            exact = chunked.preview_composition("system", [chunk.id], **arguments)
            output = chunked.generate_from_chunks("system", [chunk.id], sampling_params=greedy(2), **arguments)
            assert exact.num_computed_tokens == exact.num_tokens - (output.num_cached_tokens or 0)
        assert exact.num_computed_tokens < exact.num_tokens  # the prefix cache serves what was asked before
        assert not chunked.preview_composition(None, [chunk.id] * 9, query=QUESTION).fits


def test_a_preview_with_a_template_needs_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    with chunked_llm() as chunked:
        composition = chunked.compose(None, [chunked.register_chunk([5, 6, 7]).id], query=[8, 9])
        monkeypatch.setattr(chunked.llm_engine, "tokenizer", None)
        assert preview_of(chunked.llm_engine, composition, False, None).text is None
        with pytest.raises(ValueError, match="the engine has no tokenizer"):
            preview_of(chunked.llm_engine, composition, True, CHATML_LIKE)
