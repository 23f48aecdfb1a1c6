"""LMCache's blending API on the demo model: what its users asked for works, and ratio 1.0 is full prefill."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import settings
from tests.engine.compare import assert_same_logprobs, blend_of, record_chosen
from tests.engine.engines import DEMO, assert_empty, demo_prompt, engine, greedy, run, tiny_model
from vllm_blend import RequestOutput
from vllm_blend.entrypoints.beam_search import BeamSearchParams
from vllm_blend.lmcache import precompute
from vllm_blend.lmcache.llm import LLM, close_lmcache_engine
from vllm_blend.lmcache.precompute import OfflineKVPreCompute
from vllm_blend.lmcache.prompts import BlendPrompt, append_separator, combine_input_prompt_chunks

PARAMS = greedy(8, logprobs=2, ignore_eos=True)
SEPARATOR = "[BLEND_SEP]"


def make_llm(patch: pytest.MonkeyPatch, folder: Path, text: str, model: str = DEMO, **arguments: Any) -> LLM:
    path = folder / "kv.yaml"
    path.write_text(text)
    patch.setenv("LMCACHE_CONFIG_FILE", str(path))
    llm = LLM(model, **(settings.current().engine_arguments() | arguments))
    record_chosen(llm)
    return llm


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        text = "enable_blending: true\nblend_min_tokens: 0\n"
        yield make_llm(patch, tmp_path_factory.mktemp("config"), text)


@pytest.fixture
def llm(built: LLM) -> Iterator[LLM]:
    forget(built)
    yield built
    assert_empty(built)


def forget(llm: LLM) -> None:
    llm.reset_prefix_cache()
    llm.llm_engine.chunk_store.clear()
    llm.llm_engine.composer.num_encoded = 0
    llm._seen.clear()


@cache
def texts() -> tuple[str, tuple[str, ...], str]:
    """An instruction, documents of unequal length, and a question."""
    prompt = demo_prompt(0)
    passages = [str(chunk) for chunk in prompt["chunks"]]
    documents = ("".join(passages[:3]), passages[3], "".join(passages[4:9]), "".join(passages[9:]))
    return str(prompt["prefix"]), documents, str(prompt["suffix"])


def whole(output: RequestOutput) -> RequestOutput:
    """The same token ids, prefilled by an engine that blends nothing."""
    with engine() as plain:
        return run(plain, {"prompt_token_ids": output.prompt_token_ids}, PARAMS)[0]


def ask(llm: LLM, pieces: list[str], **options: Any) -> RequestOutput:
    [output] = run(llm, combine_input_prompt_chunks(pieces), greedy(8, logprobs=2, ignore_eos=True, **options))
    return output


def ids(llm: LLM, pieces: list[str]) -> list[int]:
    tokenizer = llm.get_tokenizer()
    return [tokenizer.bos_token_id, *(t for p in pieces for t in tokenizer.encode(p, add_special_tokens=False))]


def size(llm: LLM, *pieces: str) -> int:
    return len(ids(llm, list(pieces))) - 1


def orders() -> dict[str, tuple[list[str], list[int]]]:
    """Prompts by name, each with the documents that are stored before it comes."""
    instruction, (a, b, c, d), question = texts()
    return {
        "as precomputed": ([instruction, a, b, c, d, question], [0, 1, 2, 3]),
        "another order": ([instruction, d, b, a, c, question], [0, 1, 2, 3]),
        "question first": ([instruction, question, c, a, "Answer:"], [0, 2]),
        "question alone first": ([question, a, b], [0, 1]),
        "a hole": ([instruction, a, b, c, question], [0, 2]),
        "the first is a hole": ([instruction, a, b, c, question], [1, 2]),
        "twice the same document": ([a, b, a, question], [0]),
        "documents only": ([a, b, c, d], [0, 1, 2, 3]),
        "nothing is stored": ([instruction, a, b, question], []),
    }


@pytest.mark.parametrize("selector", ["question_attention", "value_deviation"])
@pytest.mark.parametrize("name", orders())
def test_ratio_1_is_full_prefill(name: str, selector: str, llm: LLM) -> None:
    pieces, stored = orders()[name]
    for index in stored:
        OfflineKVPreCompute(llm).precompute_kv(texts()[1][index])
    settings = vars(llm.llm_engine.config.blend)  # one engine for all cases: its options are frozen otherwise
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(settings, "recompute_ratio", 1.0)
        patch.setitem(settings, "selector", selector)
        output = ask(llm, pieces)
    assert (output.blend is not None) == bool(stored)
    assert output.prompt_token_ids == ids(llm, pieces), "each piece by itself, BOS once, no separator"
    assert_same_logprobs(output, whole(output))


@pytest.mark.parametrize("name", orders())
def test_what_is_stored_is_reused_wherever_it_stands(name: str, llm: LLM) -> None:
    pieces, stored = orders()[name]
    documents = [texts()[1][index] for index in stored]
    for document in documents:
        OfflineKVPreCompute(llm).precompute_kv(document)
    encoded = llm.llm_engine.composer.num_encoded
    output = ask(llm, pieces)
    assert llm.llm_engine.composer.num_encoded == encoded, "a prompt stores nothing that comes for the first time"
    if not stored:
        assert output.blend is None and output.num_cached_tokens == 0
        return
    assert output.blend is not None
    known = sum(size(llm, piece) for piece in pieces[:-1] if piece in documents)
    exact = 1 + (size(llm, pieces[0]) if pieces[0] in documents else 0)  # what was encoded after BOS stands after BOS
    context = len(output.prompt_token_ids) - size(llm, pieces[-1])
    assert output.blend.num_exact_tokens == exact
    assert output.blend.num_reused_tokens == known - (exact - 1) - int(0.15 * context)


def test_the_same_prompt_twice_and_a_third_time(llm: LLM) -> None:
    """Nothing was precomputed: plain at first, and what has come twice is stored."""
    instruction, (a, b, c, _), question = texts()
    first, second, third = (ask(llm, [instruction, a, b, c, question]) for _ in range(3))
    assert_same_logprobs(first, whole(first))
    assert first.blend is None and second.blend is not None
    assert llm.llm_engine.composer.num_encoded == 6, "BOS, filler, the instruction and three documents, once"
    assert_same_logprobs(second, third)
    assert blend_of(second) == blend_of(third) and third.blend is not None
    assert third.blend.num_exact_tokens == 1 + size(llm, instruction)
    ask(llm, [instruction, a, b, c, "Question: Where is it?\nAnswer:"])
    assert llm.llm_engine.composer.num_encoded == 6, "no question is stored that comes last"


def test_what_one_tenant_has_sent_is_not_known_of_another(llm: LLM) -> None:
    """Neither what is stored nor what is to be stored when it comes again."""
    instruction, (a, b, _, _), question = texts()
    text = combine_input_prompt_chunks([instruction, a, b, question])
    encoded = []
    for salt in ("tenant-a", "tenant-a", "tenant-b", None, "tenant-b"):
        [output] = run(llm, {"prompt": text, "cache_salt": salt}, PARAMS)
        assert output.prompt == text and output.error is None
        encoded.append(llm.llm_engine.composer.num_encoded)
    assert encoded == [0, 5, 5, 5, 10]
    OfflineKVPreCompute(llm).precompute_kv(b, cache_salt="tenant-c")
    [other], [own] = (run(llm, {"prompt": text, "cache_salt": salt}, PARAMS) for salt in ("tenant-d", "tenant-c"))
    assert other.blend is None and own.blend is not None
    with pytest.raises(ValueError, match=r"unknown key\(s\) \['cache_sallt'\].*did you mean 'cache_salt'"):
        run(llm, {"prompt": text, "cache_sallt": "x"}, PARAMS)


def test_what_was_precomputed_is_stored_by_the_first_prompt_that_has_other_tokens(llm: LLM) -> None:
    """Behind a space a text begins with another token. What was not precomputed is stored by the second prompt."""
    instruction, (a, b, _, _), question = texts()
    spaced = [instruction.rstrip() + " ", a.lstrip(), question]
    assert ask(llm, [spaced[0], b.lstrip(), question]).blend is None
    OfflineKVPreCompute(llm).precompute_kv(spaced[1])
    first, second = (ask(llm, spaced).blend for _ in range(2))
    assert first is not None and second is not None
    assert 0 < first.num_encoded_tokens <= second.num_reused_tokens + second.num_exact_tokens
    assert second.num_encoded_tokens == 0


def test_everything_is_stored_twice(llm: LLM) -> None:
    """A hit of 100%, the question included, and the same prompt again."""
    instruction, (a, b, _, _), question = texts()
    precompute = OfflineKVPreCompute(llm)
    for piece in (instruction, a, b, question, a):
        precompute.precompute_kv(piece)
    assert llm.llm_engine.composer.num_encoded == 2 + 2 * 4, "BOS, filler and four pieces for both places, once"
    first, second = (ask(llm, [instruction, a, b, question]) for _ in range(2))
    assert_same_logprobs(first, second)
    assert first.blend is not None and blend_of(first) == blend_of(second)
    assert first.blend.num_recomputed_tokens == size(llm, question) + int(0.15 * (1 + size(llm, instruction, a, b)))


def test_a_batch_of_all_lengths_equals_its_prompts_alone(llm: LLM) -> None:
    instruction, documents, question = texts()
    for document in documents[:3]:
        OfflineKVPreCompute(llm).precompute_kv(document)
    prompts: list[Any] = [combine_input_prompt_chunks(pieces) for pieces, _ in orders().values()]
    prompts += [question, {"prompt": instruction + question}, {"prompt": prompts[1]}]
    alone = []
    for prompt in prompts:
        alone += run(llm, [prompt], PARAMS)
        llm._seen.clear()  # what has come before is no part of this
    llm.reset_prefix_cache()
    for expected, output in zip(alone, run(llm, prompts, PARAMS), strict=True):
        assert_same_logprobs(output, expected)
        assert blend_of(output) == blend_of(expected)


def test_prefix_caching_and_blending_together(llm: LLM) -> None:
    """Blended pages never serve as a prefix, and plain prompts between blends find theirs."""
    instruction, (a, b, c, _), question = texts()
    plain = instruction + a + b + question
    [before] = run(llm, plain, PARAMS)
    for document in (a, b, c):
        OfflineKVPreCompute(llm).precompute_kv(document)
    blended = ask(llm, [instruction, c, a, question])
    same_ids = {"prompt_token_ids": blended.prompt_token_ids}
    [exact] = run(llm, same_ids, PARAMS)
    assert exact.num_cached_tokens == size(llm, instruction) // 16 * 16, "of the plain prompt, and no more"
    assert_same_logprobs(exact, whole(blended))
    llm._seen.clear()
    again, [after] = ask(llm, [instruction, c, a, question]), run(llm, plain, PARAMS)
    assert blend_of(again) == blend_of(blended)
    assert_same_logprobs(again, blended)
    assert after.num_cached_tokens and after.num_cached_tokens > size(llm, instruction, a)
    assert_same_logprobs(after, before)


def test_short_contexts_are_prefilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instruction, (a, b, c, _), question = texts()
    text = f"enable_blending: true\nblend_min_tokens: {300}\nblend_check_layers: 1\nblend_recompute_ratio: 0.3"
    llm = make_llm(monkeypatch, tmp_path, text)
    for document in (a, b, c):
        OfflineKVPreCompute(llm).precompute_kv(document)
    short = ask(llm, [instruction, b, question])
    assert len(short.prompt_token_ids) < 300 and short.blend is None
    assert_same_logprobs(short, whole(short))
    long = ask(llm, [instruction, a, b, c, question])
    assert long.blend is not None and long.blend.selector == "value_deviation" and long.blend.recompute_ratio == 0.3


def test_pieces_travel_with_the_string() -> None:
    prompt = combine_input_prompt_chunks(["one", "two" + SEPARATOR, "", "three"])
    assert isinstance(prompt, str) and prompt == SEPARATOR.join(["one", "two" + SEPARATOR, "", "three"])
    for same in (prompt, copy.deepcopy(prompt), pickle.loads(pickle.dumps(prompt))):
        assert isinstance(same, BlendPrompt) and same.pieces == ("one", "two" + SEPARATOR, "", "three")
    assert type(prompt + "!") is str and type(str(prompt)) is str
    nested = combine_input_prompt_chunks([prompt, "four"])
    assert isinstance(nested, BlendPrompt) and nested.pieces[-2:] == ("three", "four")
    assert append_separator("one") == "one" + SEPARATOR


def test_a_separator_inside_a_document_splits_nothing(llm: LLM) -> None:
    instruction, (a, b, _, _), question = texts()
    odd = a + SEPARATOR + b
    pieces = [instruction, odd, question]
    output = ask(llm, pieces)
    assert output.prompt_token_ids == ids(llm, pieces)
    assert output.prompt == SEPARATOR.join(pieces)


def test_a_stored_document_may_hold_the_separator(llm: LLM) -> None:
    """It may, whether it stands whole in a combined prompt or in pieces in a plain one."""
    instruction, (a, b, _, _), question = texts()
    odd = a + SEPARATOR + b
    OfflineKVPreCompute(llm).precompute_kv(odd)
    combined = ask(llm, [instruction, odd, question])
    [plain] = run(llm, SEPARATOR.join([instruction, odd, question]), PARAMS)
    assert (combined.num_cached_tokens or 0) > 0.7 * size(llm, odd)
    assert (plain.num_cached_tokens or 0) > 0.7 * size(llm, a, b)


def test_a_text_that_cannot_be_kept_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = "enable_blending: true\nmax_local_cpu_size: 0.000005\n"  # too little in half precision too
    llm = make_llm(monkeypatch, tmp_path, text, tiny_model("llama"))
    with caplog.at_level("WARNING"):
        OfflineKVPreCompute(llm).precompute_kv("Go")
        assert not [record for record in caplog.records if record.name == precompute.__name__]
        OfflineKVPreCompute(llm).precompute_kv("The quick brown fox. " * 3)
    assert "bytes, and the chunk store holds 5368; raise max_local_cpu_size" in caplog.text


def test_plain_strings_are_split_at_the_separator(llm: LLM) -> None:
    instruction, (a, b, _, _), question = texts()
    for document in (a, b):
        OfflineKVPreCompute(llm).precompute_kv(document)
    pieces = [instruction, b, a, question]
    combined = ask(llm, pieces)
    forms: list[Any] = [
        SEPARATOR.join(pieces),
        {"prompt": SEPARATOR.join(pieces)},
        {"prompt": BlendPrompt(pieces, "|")},
    ]
    llm._seen.clear()
    for output, form in zip(run(llm, forms, PARAMS), forms, strict=True):
        assert_same_logprobs(output, combined)
        assert blend_of(output) == blend_of(combined)
        assert output.prompt == (form if isinstance(form, str) else form["prompt"])


def test_an_output_shows_the_prompt_that_was_given(llm: LLM) -> None:
    """It does even if separators stand only at the prompt's ends and nothing is blended."""
    for prompt in (SEPARATOR + "Where?", append_separator("Where?"), "Where?"):
        [output] = run(llm, prompt, PARAMS)
        assert output.prompt == prompt and output.prompt_token_ids == ids(llm, ["Where?"])


def test_other_prompts_are_left_alone(llm: LLM) -> None:
    instruction, (a, _, _, _), question = texts()
    chunked = {"prefix": instruction, "chunks": [a], "suffix": question}
    tokens = {"prompt_token_ids": ids(llm, [question]), "prompt": instruction + SEPARATOR + question}
    first, second, third = run(llm, [chunked, tokens, question], PARAMS)
    assert first.blend is not None and first.prompt == instruction + a + question
    assert second.prompt_token_ids == third.prompt_token_ids == ids(llm, [question]) and third.prompt == question


def test_bos_stands_once(llm: LLM) -> None:
    instruction, (a, _, _, _), question = texts()
    bos = str(llm.get_tokenizer().bos_token)
    OfflineKVPreCompute(llm).precompute_kv(a)
    ask(llm, [instruction, a, question])  # so that the prefix cache has the instruction in both that are compared
    usual, written, alone = (ask(llm, [*head, a, question]) for head in ([instruction], [bos + instruction], [bos]))
    assert written.prompt_token_ids == usual.prompt_token_ids
    assert_same_logprobs(written, usual)
    assert alone.prompt_token_ids == ids(llm, [a, question])
    assert alone.blend is not None and alone.blend.num_exact_tokens == 1 + size(llm, a)
    assert_same_logprobs(alone, whole(alone))
    assert ask(llm, [bos, question]).prompt_token_ids == ids(llm, [question])


def test_bos_that_only_a_prompt_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer adds none, so nothing is encoded after it either."""
    text = "enable_blending: true\nblend_min_tokens: 0\n"
    llm = make_llm(monkeypatch, tmp_path, text, tiny_model("llama"))
    OfflineKVPreCompute(llm).precompute_kv("The quick fox.")
    output = ask(llm, ["<s>Where? ", "The quick fox.", "Go"])
    tokenizer = llm.get_tokenizer()
    assert output.prompt_token_ids[0] == tokenizer.bos_token_id == tokenizer.encode("<s>")[0]
    assert output.blend is not None and output.blend.num_exact_tokens == 0
    assert output.blend.num_reused_tokens + output.blend.num_recomputed_tokens == len(output.prompt_token_ids)
    assert output.blend.num_reused_tokens > 0


def test_early_scripts_store_by_asking(llm: LLM) -> None:
    """`generate` of a text that ends with the separator, and then of prompts that hold it."""
    instruction, (a, b, _, _), question = texts()
    for document in (a, b):
        llm.generate([append_separator(document)], greedy(1), use_tqdm=False)
    first, second, third = (ask(llm, [instruction, a, b, question]) for _ in range(3))
    assert first.blend is not None
    assert second.blend is not None and second.blend.num_encoded_tokens == size(llm, instruction)
    assert llm.llm_engine.composer.num_encoded == 5, "BOS, filler, both documents, and the instruction"
    assert third.blend is not None and third.blend.num_exact_tokens == 1 + size(llm, instruction)


def test_bad_input(llm: LLM) -> None:
    for wrong in ("text", None, 3):
        with pytest.raises(TypeError, match=r"prompt_chunks is an? .*: give a list of strings"):
            combine_input_prompt_chunks(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=re.escape("prompt_chunks[1] is a list: give strings")):
        combine_input_prompt_chunks(["a", ["b"]])  # type: ignore[list-item]
    precompute = OfflineKVPreCompute(llm)
    with pytest.raises(TypeError, match="text_chunk is a list: give a string"):
        precompute.precompute_kv(["a"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="text_chunk is empty"):
        precompute.precompute_kv("")
    with pytest.raises(ValueError, match="more than max_model_len=1024"):
        precompute.precompute_kv("word " * 2000)
    for empty in ([], ["", ""]):
        with pytest.raises(ValueError, match="prompt_chunks holds no text"):
            combine_input_prompt_chunks(empty)
    _, (a, _, _, _), question = texts()
    good, bad = run(llm, [combine_input_prompt_chunks(p) for p in ([a, question], [a * 20, question])], PARAMS)
    assert good.error is None and bad.error is not None and "max_model_len=1024" in bad.error
    with pytest.raises(TypeError, match="give a prompt or a list of prompts"):
        llm.generate(7)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a message has several pieces, which chat\(\) cannot blend"):
        llm.chat([{"role": "user", "content": combine_input_prompt_chunks([a, question])}])
    beams = BeamSearchParams(2, 2)
    with pytest.raises(ValueError, match=r"prompts\[1\] has several pieces, and a beam search cannot blend"):
        llm.beam_search([question, combine_input_prompt_chunks([a, question])], beams)
    assert len(llm.beam_search(question, beams)[0].sequences) == 2


def test_the_parts_of_a_chat_are_pieces(llm: LLM) -> None:
    """They need no separators, and are reused in any order."""
    _, (a, b, c, _), question = texts()
    for order in ((a, b, c), (c, a, b), (c, b, a)):
        before = llm.llm_engine.composer.num_encoded
        content = [{"type": "text", "text": text} for text in (*order, question)]
        template = "{% for m in messages %}<s>{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
        [output] = llm.chat([{"role": "user", "content": content}], PARAMS, use_tqdm=False, chat_template=template)
        assert output.blend is not None and output.blend.num_chunks == 3
    assert llm.llm_engine.composer.num_encoded == before
    with pytest.raises(ValueError, match=r"several pieces, .* give them as the text parts of the message's content"):
        llm.chat([{"role": "user", "content": [combine_input_prompt_chunks([a, question])]}])


def test_without_blending_prompts_are_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    instruction, (a, b, _, _), question = texts()
    llm = make_llm(monkeypatch, tmp_path, "enable_blending: false\nblend_recompute_ratio: 0.15\nchunk_size: 256")
    precompute = OfflineKVPreCompute(llm)
    assert "enable_blending is off: nothing is precomputed" in caplog.text
    precompute.precompute_kv(a)
    output = ask(llm, [instruction, a, b, question])
    assert output.blend is None and output.prompt_token_ids == ids(llm, [instruction, a, b, question])
    assert_same_logprobs(output, whole(output))
    [plain] = run(llm, "a" + SEPARATOR + "b", PARAMS)
    assert plain.prompt_token_ids == ids(llm, ["a" + SEPARATOR + "b"]), "a plain string is what it is"


def test_close_and_reopen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks outlive the engine on a disk; without the disk they are computed where they stand."""
    instruction, (a, b, c, _), question = texts()
    text = f"enable_blending: true\nblend_min_tokens: 0\nlocal_disk: file://{tmp_path}/store/\nmax_local_disk_size: 1\n"
    first = make_llm(monkeypatch, tmp_path, text)
    for document in (a, b):
        OfflineKVPreCompute(first).precompute_kv(document)
    expected = ask(first, [instruction, b, c, a, question])
    close_lmcache_engine()
    close_lmcache_engine()
    assert len(first.llm_engine.chunk_store) == 0
    alone = ask(first, [instruction, b, c, a, question.replace("?", "")])
    assert alone.error is None and len(list((tmp_path / "store").iterdir())) > 0
    first.shutdown()  # three engines at once took more memory than any other test

    second = make_llm(monkeypatch, tmp_path, text)
    output = ask(second, [instruction, b, c, a, question])
    assert blend_of(output) == blend_of(expected) and second.llm_engine.composer.num_encoded == 0
    assert_same_logprobs(output, expected)
    close_lmcache_engine()
    second.shutdown()

    third = make_llm(monkeypatch, tmp_path, text.replace("/store/", "/other/"))
    output = ask(third, [instruction, b, c, a, question])
    assert output.blend is None
    assert_same_logprobs(output, whole(output))
    close_lmcache_engine()


def test_a_remote_url_is_the_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    instruction, (a, b, _, _), question = texts()
    text = f"enable_blending: true\nblend_min_tokens: 0\nremote_url: file://{tmp_path}/server\nremote_serde: naive\n"
    OfflineKVPreCompute(make_llm(monkeypatch, tmp_path, text)).precompute_kv(a)
    close_lmcache_engine()
    llm = make_llm(monkeypatch, tmp_path, text)
    output = ask(llm, [instruction, b, a, question])
    assert output.blend is not None and llm.llm_engine.composer.num_encoded == 0
    close_lmcache_engine()
    with pytest.raises(ValueError, match=r"kv.yaml: remote_url: Protocol not known: lm: give a URL such as redis://"):
        make_llm(monkeypatch, tmp_path, "enable_blending: true\nremote_url: lm://localhost:65432\n")
