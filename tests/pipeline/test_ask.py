"""Prompts are what the model's own chat template makes of the message, with its special tokens as such."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.checkout import ROOT
from tests.engine.tiny_tokenizers import byte_level
from vllm_blend.pipeline.ask import ByChatTemplate, ByStyle, by_chat_template, choose_asking
from vllm_blend.pipeline.datasets import Sample, SamplePassage
from vllm_blend.prompt_parser import parse_prompt

pytestmark = pytest.mark.cpu_only

DEMO_REUSE = ROOT / "inputs" / "demo-model-reuse"
SAMPLE = Sample(
    "s",
    " Who barks? ",
    (SamplePassage("Dog", "The dog barks.\n", None), SamplePassage("", "It <s> naps.", None)),
    ("dog",),
    None,
    None,
)
MESSAGE = (
    "Answer the question with a short phrase copied from the passages.\n\nDog\nThe dog barks.\n\nIt <s> naps.\n\n"
    "Question: Who barks?\nAnswer with a short phrase from the passages."
)
CHAT_ML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}"
    "<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def tokenizer_of(template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = copy.deepcopy(byte_level())
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


def message(template: str) -> list[dict[str, Any]]:
    content: Any = [{"type": "text", "text": MESSAGE}] if template == PARTS else MESSAGE
    return [{"role": "user", "content": content}]


def asking_of(template: str) -> ByChatTemplate:
    asking = choose_asking(tokenizer_of(template), "hotpot.jsonl")
    assert isinstance(asking, ByChatTemplate)
    return asking


@pytest.mark.parametrize("template", [CHAT_ML, LLAMA, PARTS], ids=["chatml", "llama", "parts"])
def test_a_prompt_is_what_the_chat_template_makes(template: str) -> None:
    asking, tokenizer = asking_of(template), tokenizer_of(template)
    options: dict[str, Any] = {"add_generation_prompt": True, "enable_thinking": False}
    expected = tokenizer.apply_chat_template(message(template), tokenize=False, **options)
    prompt: Any = asking.prompt(SAMPLE)
    chunks = prompt["chunks"]
    assert "".join([asking.prefix_text, *chunks, prompt["suffix"]]) == expected
    assert chunks == ["Dog\nThe dog barks.\n\n", "It <s> naps.\n\n"]
    assert prompt["suffix"].startswith("Question: Who barks?\n")
    parsed = parse_prompt(prompt, tokenizer, len(tokenizer), trusts=True)
    encoded: Any = tokenizer.apply_chat_template(message(template), **options)
    ids = encoded["input_ids"]
    assert (
        parsed.token_ids == ids
    )  # BOS only where the template has it; special tokens are special ones of trusted chunks
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == expected.count("<|im_end|>") > 0
    assert [tokenizer.decode(ids[start:stop]) for start, stop in parsed.chunk_bounds] == chunks


def text_of(asking: ByChatTemplate) -> str:
    prompt: Any = asking.prompt(SAMPLE)
    return "".join([asking.prefix_text.removeprefix(asking.head), *prompt["chunks"], prompt["suffix"]])


def test_the_wording_may_be_another_one() -> None:
    asking = choose_asking(tokenizer_of(LLAMA), "a.json", None, "Read.\\n", "Q: {question}\\nA:")
    assert isinstance(asking, ByChatTemplate)
    assert text_of(asking) == f"Read.\n\nDog\nThe dog barks.\n\nIt <s> naps.\n\nQ: Who barks?\nA:{asking.tail}"


@pytest.mark.parametrize("template", [CHAT_ML, LLAMA, PARTS], ids=["chatml", "llama", "parts"])
def test_an_answer_is_what_the_chat_template_makes_of_it(template: str) -> None:
    asking, tokenizer = asking_of(template), tokenizer_of(template)
    answered = [*message(template), {"role": "assistant", "content": "The dog"}]
    if template == PARTS:
        answered[-1]["content"] = [{"type": "text", "text": "The dog"}]
    rendered: Any = tokenizer.apply_chat_template(answered, tokenize=False)
    assert asking.answer("The dog").endswith("The dog<|im_end|>")
    if template != CHAT_ML:  # that one has the model think of nothing before it answers
        prompt = "".join(
            [asking.prefix_text, *map(str, asking.prompt(SAMPLE)["chunks"]), asking.suffix(SAMPLE.question)]
        )
        assert rendered.startswith(prompt.removesuffix("A:"))
        assert rendered.rstrip().endswith(asking.answer("The dog"))
    plain = by_chat_template(tokenizer_of("{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"))
    assert plain is not None and plain.answer("The dog") == "assistant: The dog\n"
    assert choose_asking(None, "musique.json").answer("The dog") == " The dog\n"


def test_dialogues_are_summarized() -> None:
    asking = choose_asking(tokenizer_of(LLAMA), "inputs/samsum.json")
    assert isinstance(asking, ByChatTemplate) and (asking.max_tokens, asking.style.metric) == (48, "rouge_l")
    assert text_of(asking).startswith("Summarize the dialogue in the style of the examples.\n\nDog\n")
    assert text_of(asking).endswith(f"Dialogue: Who barks?\nSummary:{asking.tail}")


def test_a_prompt_may_have_other_passages() -> None:
    [chunk] = asking_of(LLAMA).prompt(SAMPLE, [SamplePassage("", "Cats purr.", None)])["chunks"]
    assert chunk == "Cats purr.\n\n"


def test_a_template_that_knows_no_roles_is_not_an_instruct_models() -> None:
    """The demo models' template shows the last part of any message as a question."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO_REUSE)
    assert tokenizer.chat_template is not None and by_chat_template(tokenizer) is None
    assert choose_asking(tokenizer, "musique_s.json").name == "style musique"


def test_a_model_without_a_template_is_asked_in_a_style() -> None:
    asking = choose_asking(tokenizer_of(None), "my_musique.json", None, "", "Q: {question}")
    assert isinstance(asking, ByStyle) and asking.name == "style musique"
    assert asking.prompt(SAMPLE) == {
        "prefix": "You will be asked a question after reading several passages. Answer within five words.\nPassages:\n",
        "chunks": ["Dog\n\nThe dog barks.\n\n\n", "It <s> naps.\n\n"],
        "suffix": "Q: Who barks?",
    }
    for style, path in (("wikimqa", "a.json"), ("by-name", "my_wikimqa.json")):
        styled = choose_asking(tokenizer_of(CHAT_ML), path, style)
        assert isinstance(styled, ByStyle) and styled.style.name == "wikimqa"


def test_what_cannot_be_asked_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"cannot tell how to ask data set 'a\.json'"):
        choose_asking(tokenizer_of(None), "a.json")
    with pytest.raises(ValueError, match="--style 'squad' is unknown"):
        choose_asking(tokenizer_of(CHAT_ML), "a.json", "squad")
    with pytest.raises(ValueError, match=r"--template='Why' must hold \{question\} once"):
        choose_asking(tokenizer_of(CHAT_ML), "a.json", None, "", "Why")
    with pytest.raises(ValueError, match="does not show the user's message once"):
        by_chat_template(tokenizer_of("{{ messages[0]['role'] }}{{ messages[0]['content'] | upper }}"))
    changing = asking_of("{{ messages[0]['role'] }}: {{ messages[0]['content'].replace('dog', 'cat') }}")
    with pytest.raises(ValueError, match="s: the chat template changes the text of its message"):
        changing.prompt(SAMPLE)
