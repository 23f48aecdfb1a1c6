"""Which tokens end a text: one rule for all sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models
from transformers import LlamaConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.engine.engines import greedy, new_llm, run
from tests.engine.tiny_tokenizers import byte_level
from tests.models.gguf_files import gguf_model, write_gguf
from tests.models.gguf_vocabularies import CHATML, entries_of
from vllm_blend.engine.end_tokens import eos_token_ids

NO_EOS = LlamaConfig(eos_token_id=None)
# Templates that write the token `end` after every message, gpt-oss' among them: it ends an answer in another way.
TURNS = "{% for m in messages %}<|turn|>{{ m.content }}{{ end }}\n{% endfor %}"
HARMONY = "{% for m in messages %}<|start|>{{ m.content }}{{ '<|return|>' if loop.last else '<|end|>' }}{% endfor %}"
SYSTEM_ONLY = "{{ raise_exception('no messages of an assistant') }}"


def tokenizer_with(*special: str, eos: str | None = None, template: str | None = None) -> PreTrainedTokenizerBase:
    """Return a tokenizer with these special tokens, and "</s>" as a word of HTML."""
    backend = Tokenizer(models.WordLevel({"x": 0}, "x"))
    backend.add_special_tokens(list(special))
    backend.add_tokens([AddedToken("</s>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=template)


@pytest.mark.parametrize(
    ("generation", "config", "expected"), [(3, 4, {1, 3, 4}), (None, [4, 5], {1, 4, 5}), ([3, 6], None, {1, 3, 6})]
)
def test_each_source_counts(generation: Any, config: Any, expected: set[int]) -> None:
    tokenizer, hf_config = tokenizer_with("<end>", eos="<end>"), LlamaConfig(eos_token_id=config)
    assert eos_token_ids({"eos_token_id": generation}, hf_config, tokenizer) == expected
    assert eos_token_ids({"eos_token_id": generation}, hf_config, None) == expected - {1}


# What published generation configs name, of tokenizers that name one of them.
FAMILIES: dict[str, tuple[PreTrainedTokenizerBase, set[str]]] = {
    "qwen 2.5": (
        tokenizer_with("<|endoftext|>", "<|im_start|>", "<|im_end|>", eos="<|im_end|>", template=CHATML),
        {"<|im_end|>", "<|endoftext|>"},
    ),
    "llama 3.1": (
        tokenizer_with("<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>", eos="<|eot_id|>"),
        {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"},
    ),
    "gemma 3": (
        tokenizer_with("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", eos="<eos>"),
        {"<eos>", "<end_of_turn>"},
    ),
    "gpt-oss": (
        tokenizer_with(
            *("<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|call|>"), eos="<|return|>", template=HARMONY
        ),
        {"<|return|>", "<|endoftext|>", "<|call|>"},
    ),
    "granite": (tokenizer_with("<|end_of_text|>", "<|start_of_role|>", eos="<|end_of_text|>"), {"<|end_of_text|>"}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_without_a_generation_config_names_count(name: str) -> None:
    tokenizer, expected = FAMILIES[name]
    ids = eos_token_ids({}, NO_EOS, tokenizer)
    assert {tokenizer.decode([token]) for token in ids} == expected
    assert eos_token_ids({"eos_token_id": 0}, NO_EOS, tokenizer) == {0, tokenizer.eos_token_id}


def test_what_the_template_writes_after_an_answer_counts() -> None:
    """The longest special token there, and no word."""
    special = ("<|turn|>", "<|over", "<|over|>")
    for end, expected in (("<|over|>", {3}), (" <|over|>", {3}), ("over", set()), ("</s>", set())):
        tokenizer = tokenizer_with(*special, template=TURNS.replace("{{ end }}", end))
        assert eos_token_ids({}, NO_EOS, tokenizer) == expected
    assert eos_token_ids({}, NO_EOS, tokenizer_with(*special, template=SYSTEM_ONLY)) == set()


def test_bad_ids_are_named() -> None:
    with pytest.raises(ValueError, match="eos_token_id='</s>' of the model must be a token id or a list"):
        eos_token_ids({"eos_token_id": "</s>"}, NO_EOS, None)


def test_an_engine_ends_at_each_token_of_a_gguf_file(tmp_path: Path) -> None:
    """The file's eos, eot and eom, also with another tokenizer, whose folder's generation config adds its own."""
    tokenizer = byte_level()
    model = gguf_model("llama", vocab_size=len(tokenizer))
    plain = write_gguf(tmp_path / "plain.gguf", "llama", model, vocabulary=entries_of(tokenizer, "gpt-2"))
    arguments: dict[str, Any] = {"num_gpu_blocks_override": 32}
    with new_llm(plain, **arguments) as llm:
        assert llm.llm_engine.eos_token_ids == {1}
        tokens = run(llm, "The quick", greedy(8, ignore_eos=True))[0].outputs[0].token_ids
    distinct = list(dict.fromkeys(token for token in tokens if token > 2))
    eot, other = distinct[1], distinct[2]
    entries = entries_of(tokenizer, "gpt-2", **{"ggml.eot_token_id": eot, "ggml.eom_token_id": 2})
    path = write_gguf(tmp_path / "model.gguf", "llama", model, vocabulary=entries)
    with new_llm(path, **arguments) as llm:
        assert llm.llm_engine.eos_token_ids == {1, 2, eot}
        answer = run(llm, "The quick", greedy(8))[0].outputs[0]
        assert (answer.token_ids, answer.finish_reason) == (tokens[: tokens.index(eot) + 1], "stop")
    tokenizer.save_pretrained(tmp_path / "folder")
    (tmp_path / "folder" / "generation_config.json").write_text(f'{{"eos_token_id": [1, {other}], "top_k": 7}}')
    with new_llm(path, tokenizer=str(tmp_path / "folder"), **arguments) as llm:
        assert llm.llm_engine.eos_token_ids == {1, 2, eot, other}
        assert llm.get_default_sampling_params().top_k == 7
