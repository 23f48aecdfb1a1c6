"""`LLM.chat` takes vLLM's arguments and messages; with blending on, text parts are chunks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from tests.blend.prompts import assert_counts_add_up
from tests.chunks.test_chat import CHATML_LIKE, LLAMA3_LIKE
from tests.chunks.test_chat_prompt import CALL, LISTS, parts
from tests.engine.compare import assert_same_logprobs
from tests.engine.engines import demo_prompt, engine, greedy, tiny_model, tokens_of
from vllm_blend import LLM, RequestOutput

TINY = tiny_model("llama")
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
BARE = "{% for m in messages %}{{ m.content }}{% endfor %}:"
USER = {"role": "user", "content": "Go"}


def prompts(llm: LLM, messages: Any, template: str = PLAIN, **arguments: Any) -> list[str | None]:
    outputs = llm.chat(messages, greedy(1), use_tqdm=False, chat_template=template, **arguments)
    return [output.prompt for output in outputs]


# Arguments and messages


def test_messages_as_vllm_takes_them() -> None:
    """Parts are joined by newlines, or stay a list for templates that loop over them; None is the content of a message
    with tool calls, whose arguments are dicts in the template."""
    two = [parts("The fox", "jumps")]
    with engine(TINY) as llm:
        assert prompts(llm, two) == ["user:The fox\njumps\nA:"]
        assert prompts(llm, [two, [USER]]) == ["user:The fox\njumps\nA:", "user:Go\nA:"]
        kinds = ["over", {"type": "input_text", "text": "the"}, {"type": "refusal", "refusal": "dog"}]
        assert prompts(llm, [{"role": "user", "content": kinds}]) == ["user:over\nthe\ndog\nA:"]
        assert prompts(llm, two, LISTS) == ["<|sep|>user\nThe foxjumps</s>\n<|sep|>assistant\n"]
        assert prompts(llm, [USER], LISTS) == ["<|sep|>user\nGo</s>\n<|sep|>assistant\n"]
        shown = "{{ messages[0].content }}"
        [text] = prompts(llm, two, shown, chat_template_content_format="openai")
        assert text == str([{"type": "text", "text": "The fox"}, {"type": "text", "text": "jumps"}])
        assert prompts(llm, two, shown, chat_template_content_format="string") == ["The fox\njumps"]
        calls = [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, parts("Over", role="tool")]
        template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.arguments.q }};{% endfor %}"
        assert prompts(llm, calls[1:2], template) == ["dog;"]
        assert prompts(llm, calls) == ["user:Go\nassistant:\ntool:Over\nA:"]
        assert CALL["function"]["arguments"] == '{"q": "dog"}'  # type: ignore[index]  # the caller's own is left alone


def test_arguments_reach_the_template(caplog: pytest.LogCaptureFixture) -> None:
    template = "{{ messages[0].content }}{{ ' thinks' if thinking }}{{ tools | length if tools }}{{ date }}"
    tool = {"type": "function", "function": {"name": "search", "description": "", "parameters": {}}}
    with engine(TINY) as llm:
        assert prompts(llm, [USER], template, chat_template_kwargs={"thinking": True, "date": 7}) == ["Go thinks7"]
        assert prompts(llm, [USER], template, tools=[tool]) == ["Go1"]
        assert prompts(llm, [USER], add_generation_prompt=False) == ["user:Go\n"]
        assert prompts(llm, [USER], chat_template_kwargs={"add_generation_prompt": False}) == ["user:Go\n"]
        last = [USER, {"role": "assistant", "content": "The answer"}]
        options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
        assert prompts(llm, last, **options) == ["user:Go\nassistant:The answer"]
        assert "does not read" not in caplog.text
        assert prompts(llm, [USER], tools=[tool], chat_template_kwargs={"thinkin": False}) == ["user:Go\nA:"]
        assert "the chat template does not read tools, thinkin:" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lora_request": "adapter"}, "lora_request='adapter' is not supported"),
        ({"mm_processor_kwargs": {"num_crops": 4}}, "mm_processor_kwargs=.* is not supported"),
        ({"tokenization_kwargs": {"truncation": True}}, "tokenization_kwargs=.* is not supported"),
        ({"continue_final_message": True}, "exclude each other: give add_generation_prompt=False"),
        ({"chat_template_content_format": "list"}, "chat_template_content_format='list' is unknown"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs has tokenize"),
        ({"chat_template": "{% for %}"}, "the chat template cannot be parsed"),
        ({"chat_template": "{{ 1 // 0 }}"}, "division|modulo"),
        ({"chat_template": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"}, "recursion"),
        ({"chat_template": "{{ raise_exception('roles must alternate') }}"}, "conversation 0: roles must alternate"),
        ({"chat_template": "{{ messages[0].content + [1] }}"}, "does not take conversation 0: .*concatenate"),
        ({"chat_template": ""}, "the decoder prompt cannot be empty"),
        ({"cache_salt": ""}, "cache_salt"),
    ],
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str) -> None:
    with engine(TINY) as llm, pytest.raises(ValueError, match=message):
        llm.chat([USER], greedy(1), use_tqdm=False, **({"chat_template": PLAIN} | arguments))


def test_misspelt_arguments_are_a_type_error() -> None:
    with engine(TINY) as llm:
        with pytest.raises(TypeError, match="chat_template_kwarg"):
            llm.chat([USER], greedy(1), chat_template=PLAIN, chat_template_kwarg={})  # type: ignore[call-arg]
        for wrong in ({"chat_template_kwargs": [1]}, {"chat_template": 7}, {"tools": "search"}, {"tools": [7]}):
            with pytest.raises(TypeError, match=f"{next(iter(wrong))}"):
                llm.chat([USER], greedy(1), **({"chat_template": PLAIN} | wrong))
        prompts(llm, [USER], lora_request=None, mm_processor_kwargs={}, tokenization_kwargs=None)
    names = list(inspect.signature(LLM.chat).parameters)
    assert names[1:6] == ["messages", "sampling_params", "use_tqdm", "lora_request", "chat_template"]


def undescribed(query):  # type: ignore[no-untyped-def]
    return query


def untyped(query):  # type: ignore[no-untyped-def]
    """Search.

    Args:
        query: What to look for.
    """
    return query


def described(query: str) -> str:
    """Search.

    Args:
        query: What to look for.
    """
    return query


def test_functions_as_tools() -> None:
    template = "{{ messages[0].content }}{{ tools[0].function.name }}"
    with engine(TINY) as llm:
        assert prompts(llm, [USER], template, tools=[described]) == ["Godescribed"]
        for tool in (undescribed, untyped):
            for arguments in ({"tools": [described, tool]}, {"chat_template_kwargs": {"tools": [described, tool]}}):
                with pytest.raises(ValueError, match=rf"tools.*\[1\], the function '{tool.__name__}', cannot be descr"):
                    prompts(llm, [USER], template, **arguments)
        with pytest.raises(TypeError, match=r"tools\[0\] is a type: give a JSON schema as a dict, or a function"):
            prompts(llm, [USER], template, tools=[dict])


@pytest.mark.parametrize("flag", ["add_generation_prompt", "continue_final_message"])
def test_flags_are_true_or_false(flag: str) -> None:
    with engine(TINY) as llm:
        with pytest.raises(TypeError, match=f"^{flag}='no' is a str: give True or False"):
            prompts(llm, [USER], **{flag: "no"})
        with pytest.raises(TypeError, match=rf"chat_template_kwargs\['{flag}'\]='no' is a str: give True or False"):
            prompts(llm, [USER], chat_template_kwargs={flag: "no"})


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([], ValueError, "messages is an empty list"),
        ([[USER], []], ValueError, r"messages\[1\] is an empty list"),
        ("Go", TypeError, "messages is a str: give a list of messages"),
        (USER, TypeError, "messages is a dict: give a list of messages"),
        ([[USER], USER], TypeError, r"messages\[1\] is a dict: .* lists of messages alone"),
        ([USER, "Go"], TypeError, r"messages\[1\] is a str: give a dict with 'role' and 'content'"),
        ([{"content": "Go"}], ValueError, r"messages\[0\] has the role None"),
        ([{"role": "user", "contents": "Go"}], ValueError, r"messages\[0\] has no content, which only"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], ValueError, "has no content, which only"),
        ([{"role": "user", "content": None, "tool_calls": [CALL]}], ValueError, "has no content, which only"),
        ([{"role": "user", "content": 7}], TypeError, r"messages\[0\]\['content'\] is an int: give a string or a list"),
        (
            [[USER], [{"role": "user", "content": {"text": "Go"}}]],
            TypeError,
            r"messages\[1\]\[0\]\['content'\] is a dict",
        ),
        ([parts("Go", 7)], TypeError, r"\['content'\]\[1\]\['text'\] is an int: give a string"),  # type: ignore[arg-type]
        ([{"role": "user", "content": [7]}], TypeError, r"\['content'\]\[0\] is an int"),
        (
            [{"role": "user", "content": [{"type": ["text"], "text": "Go"}]}],
            TypeError,
            r"\['content'\]\[0\]\['type'\] is \['text'\], a list: give a string",
        ),
        ([{"role": "user", "content": [{"text": "Go"}]}], ValueError, r"\['content'\]\[0\] is of type None"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            ValueError,
            "of type 'image_url', but",
        ),
        ([{"role": "user", "content": "a\ud800"}], ValueError, "half of a surrogate pair"),
        ([{"role": "assistant", "content": None, "tool_calls": "a"}], TypeError, r"\['tool_calls'\] is a str"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], ValueError, "is not a function call"),
    ],
)
def test_bad_messages(messages: Any, error: type[Exception], message: str) -> None:
    """An error before any work, also where other conversations are sound."""
    with engine(TINY) as llm:
        before = llm.llm_engine.metrics.num_steps
        with pytest.raises(error, match=message):
            llm.chat(messages, greedy(1), use_tqdm=False, chat_template=PLAIN)
        assert llm.llm_engine.metrics.num_steps == before


# Blending


def passages(index: int = 0, count: int = 5) -> list[str]:
    return [str(passage).strip() for passage in demo_prompt(index)["chunks"][:count]]


def chat(llm: LLM, conversations: Any, template: str, tokens: int = 6) -> list[RequestOutput]:
    return llm.chat(conversations, greedy(tokens, logprobs=3), use_tqdm=False, chat_template=template)


def test_parts_are_reused_in_any_order_and_conversation() -> None:
    """The second conversation encodes nothing. What is counted makes up the prompt."""
    system = {"role": "system", "content": "Answer the question."}
    texts = passages()
    first = [system, parts(*texts, "Who lives there?")]
    second = [
        system,
        parts(*texts[3:1:-1], "Where?"),
        {"role": "assistant", "content": "There."},
        parts(texts[0], texts[4], texts[1], "And who?"),
    ]
    with engine(enable_blending=True, blend_selector="none") as llm:
        composer = llm.llm_engine.composer
        start = composer.num_encoded
        [output] = chat(llm, first, CHATML_LIKE)
        assert composer.num_encoded == start + 1 + len(texts)  # the prefix, too
        assert output.blend is not None and output.blend.num_chunks == len(texts)
        [output] = chat(llm, second, CHATML_LIKE)
        assert composer.num_encoded == start + 2 + len(texts)  # the first question has become a part
        blend = output.blend
        assert blend is not None and blend.num_chunks == len(texts) + 1 and blend.num_merged_parts == 0
        tokenizer = llm.get_tokenizer()
        reused = sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in [*texts[:3], texts[4], "Where?"])
        assert (
            blend.num_reused_tokens + blend.num_encoded_tokens == reused
        )  # but the first chunk is exact: it stands where it was encoded
        llm.chat(second, greedy(1), use_tqdm=False, chat_template=CHATML_LIKE, cache_salt="another tenant")
        assert composer.num_encoded == start + 2 * (2 + len(texts))
        assert_counts_add_up(output)


@pytest.mark.parametrize("template", [BARE, CHATML_LIKE], ids=["no prefix", "a prefix"])
def test_what_a_tool_found_is_reused_for_the_next_question(template: str) -> None:
    """The question stands before the tool's parts. A second one finds the prefix and the parts, and is computed itself,
    as is the call."""
    texts = passages(count=2)
    asked = ["Who lives there?", "And when was it built, and by whom?"]
    call = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    conversations = [[{"role": "user", "content": each}, call, parts(*texts, role="tool")] for each in asked]
    with engine(enable_blending=True, blend_selector="none") as llm:
        composer = llm.llm_engine.composer
        start = composer.num_encoded
        first, second = (chat(llm, conversation, template)[0] for conversation in conversations)
        assert composer.num_encoded == start + (2 if template is BARE else 3)
        tokenizer = llm.get_tokenizer()
        ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        in_parts = sum(map(len, ids))
        assert first.blend is not None and second.blend is not None and first.prompt is not None
        prefix = tokenizer.encode(first.prompt[: first.prompt.index(asked[0])], add_special_tokens=False)
        assert (first.blend.num_encoded_tokens, first.blend.num_reused_tokens) == (len(prefix) + in_parts, 0)
        assert (second.blend.num_encoded_tokens, second.blend.num_exact_tokens) == (0, len(prefix))
        assert second.blend.num_reused_tokens == in_parts
        assert_counts_add_up(second)
        llm.llm_engine.chunk_store.clear()
        for part in ids:  # each by itself
            llm.encode_chunks(prefix, [part])
        [again] = chat(llm, conversations[1], template)
        assert again.blend == second.blend and tokens_of([again]) == tokens_of([second])


@pytest.mark.parametrize("template", [BARE, CHATML_LIKE, LLAMA3_LIKE, LISTS], ids=["bare", "chatml", "llama3", "lists"])
def test_recomputing_everything_is_no_blending(template: str) -> None:
    """Several conversations in a batch, and each alone; parts with seams in tokens, white space and tool results."""
    texts = passages(1)
    half = len(texts[0]) // 2
    system = {"role": "system", "content": "Answer."}
    conversations: list[Any] = [
        [system, parts(*texts, "Who?")],
        [system, parts(texts[0][:half], texts[0][half:], f"\n\n{texts[2]}\n\n", texts[1], "Where?")],
        [{"role": "user", "content": "Who?"}, parts(*texts[:3], role="tool")],
        [{"role": "user", "content": texts[3]}, {"role": "assistant", "content": "Yes."}, parts(texts[4], "When?")],
        [{"role": "user", "content": "Who are you?"}],
    ]
    with engine() as llm:
        plain = chat(llm, conversations, template)
    with engine(enable_blending=True, blend_recompute_ratio=1.0) as llm:
        outputs = chat(llm, conversations, template)
        alone = [chat(llm, conversation, template)[0] for conversation in conversations]
    assert [o.prompt_token_ids for o in outputs] == [o.prompt_token_ids for o in plain]
    for output, single, full in zip(outputs, alone, plain, strict=True):
        assert_same_logprobs(output, full)
        assert_same_logprobs(single, full)
    assert [o.prompt for o in outputs] == [o.prompt for o in plain]
    assert [0 if o.blend is None else o.blend.num_chunks for o in outputs] == [5, 4, 3, 2, 0]


def test_merged_and_unfound_parts_are_counted() -> None:
    def counters(llm: LLM) -> tuple[float, float]:
        values = {metric.name: metric.value for metric in llm.get_metrics()}
        return values["vllm_blend:chat_parts_merged"], values["vllm_blend:chat_parts_unfound"]

    texts = passages()
    word = texts[0].index(" ", 40)
    messages = [parts(texts[0][: word - 1], texts[0][word - 1 :], texts[1], "Who?")]
    with engine(enable_blending=True) as llm:
        merged, unfound = counters(llm)
        [output] = chat(llm, messages, LISTS)
        assert output.blend is not None and output.blend.num_merged_parts >= 2
        assert counters(llm) == (merged + output.blend.num_merged_parts, unfound)
        [output] = chat(llm, messages, "{{ messages[0].content | lower }}:")
        assert output.blend is None and counters(llm)[1] == unfound + 3
