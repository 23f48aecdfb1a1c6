"""What a notebook shows of an object: a short line, and of an output the prompt with its tokens coloured."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from html import unescape

from tests.chunks.llms import chunked_llm
from tests.engine.engines import DEMO, engine, greedy, tiny_model
from vllm_blend import LLM, ChunkedPrompt, CompletionOutput, RequestOutput
from vllm_blend.detokenizer import token_texts
from vllm_blend.engine_args import OPTIONS
from vllm_blend.prompt_html import KINDS, MAX_SHOWN_TOKENS, prompt_html

TINY = tiny_model("llama")
SPAN = re.compile(r'<span style="background:([^"]*)" title="([^"]*)">([^<]*)</span>')


def shown(html: str) -> list[tuple[str, str]]:
    """Return (letter, text) of every coloured piece of the prompt."""
    letters = {colour: letter for letter, (_, colour) in KINDS.items()}
    [prompt] = re.findall(r"<div style=[^>]*>(.*?)</div>", html, re.DOTALL)
    return [(letters[colour], unescape(text)) for colour, _, text in SPAN.findall(prompt)]


def test_a_blended_output_shows_its_prompt_in_the_colours_of_what_was_done() -> None:
    passages = ["Tulmaris makes <b>lenses</b> & more.\n\n", "Café Jorholm, founded in 1907.\n\n"]
    options = {"enable_blending": True, "blend_selector": "first_tokens", "blend_recompute_ratio": 0.3}
    with engine(DEMO, **options) as llm:
        for order in (passages, passages[::-1]):
            prompt: ChunkedPrompt = {"prefix": "<script>alert(1)</script>\n", "chunks": order, "suffix": "Who?"}
            [output] = llm.generate(prompt, greedy(2), use_tqdm=False)
            blend, html = output.blend, output._repr_html_()
            assert blend is not None and len(blend.token_kinds) == len(output.prompt_token_ids)
            counts = {letter: blend.token_kinds.count(letter) for letter in "renc"}
            assert counts["e"] == blend.num_exact_tokens and counts["n"] == blend.num_encoded_tokens
            assert counts["c"] == blend.num_recomputed_tokens and counts["r"] == blend.num_reused_tokens
            texts = token_texts(llm.get_tokenizer(), output.prompt_token_ids)
            pieces = shown(html)
            assert "".join(text for _, text in pieces) == "".join(texts)
            assert [letter for letter, _ in pieces] == list(re.sub(r"(.)\1+", r"\1", blend.token_kinds))
            assert "<script" not in html and "<b>lenses" not in html and blend.selector in html
        assert blend is not None and {"r", "c"} <= set(blend.token_kinds)  # the second reused


def test_a_plain_prompt_shows_its_cached_prefix() -> None:
    with engine(TINY) as llm:
        ids = list(range(5, 45))
        llm.generate([ids], greedy(1), use_tqdm=False)
        [output] = llm.generate([ids], greedy(1), use_tqdm=False)
        cached = output.num_cached_tokens
        assert cached and output.blend is None
        texts = token_texts(llm.get_tokenizer(), ids)
        assert shown(output._repr_html_()) == [("e", "".join(texts[:cached])), ("c", "".join(texts[cached:]))]


def test_copies_show_token_ids_and_carry_no_tokenizer() -> None:
    with engine(TINY) as llm:
        [output] = llm.generate("over the lazy dog", greedy(1), use_tqdm=False)
    for copied in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
        assert copied == output
        assert shown(copied._repr_html_()) == [("c", "".join(f"[{token}]" for token in output.prompt_token_ids))]


def test_long_prompts_are_cut_and_errors_shown() -> None:
    failed = RequestOutput("3", None, [7] * (MAX_SHOWN_TOKENS + 5), None, [], finished=True, error="<i>bad</i>")
    html = failed._repr_html_()
    assert " … and 5 more tokens" in html and "&lt;i&gt;bad&lt;/i&gt;" in html and "<i>" not in html
    assert "more tokens" not in prompt_html("t", "cc", ["a", "b"], [])


def test_reprs_are_short() -> None:
    long = CompletionOutput(0, "x" * 500, list(range(300)), finish_reason="length")
    output = RequestOutput("7", "p" * 4000, list(range(4000)), None, [long], finished=True, num_cached_tokens=16)
    assert repr(long) == f"CompletionOutput(0: '{'x' * 59}…', 300 tokens, length)"
    assert repr(output) == f"RequestOutput('7': 4000 prompt tokens (16 cached), outputs=[{long!r}])"
    with chunked_llm() as llm:
        system = llm.register_chunk(list(range(5, 13)), "SYSTEM_PROMPT", name="s")
        context = llm.register_chunk(list(range(20, 50)))
        composition = llm.compose("s", [context.id], query=[9, 9])
        preview = llm.preview_composition("s", [context.id], query=[9, 9])
        info = llm.get_chunk("s")
        assert repr(system) == f"Chunk({system.id[:8]}…, SYSTEM_PROMPT, {len(system)} tokens)"
        assert repr(info) == f"ChunkInfo('s': {system!r}, {info.num_bytes} bytes)"
        assert repr(composition.parts[0]).startswith("Part(") and len(repr(composition.parts[0])) < 100
        assert repr(composition).startswith(f"ChunkComposition(blend, {len(composition.token_ids)} tokens: ")
        assert repr(preview) == (
            f"CompositionPreview({preview.num_tokens} of {preview.max_model_len} tokens in {len(preview.parts)} parts, "
            f"{preview.num_computed_tokens} to compute)"
        )
        assert repr(llm) == f"ChunkedLLM(2 chunks, {llm.llm!r})"
        inner = llm.llm_engine
        assert repr(inner) == f"<LLMEngine of {inner.config.model.model!r}, 0 unfinished requests>"


def test_the_signature_of_llm_has_every_option_with_its_type_and_default() -> None:
    shown = inspect.signature(LLM).parameters
    assert list(shown)[:2] == ["model", "tokenizer"] and set(shown) == set(OPTIONS)
    assert shown["model"].default is inspect.Parameter.empty
    assert all(shown[name].default == option.default for name, option in OPTIONS.items() if not option.is_required)
    assert shown["blend_recompute_ratio"].annotation == OPTIONS["blend_recompute_ratio"].type
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in list(shown.values())[2:])
