"""Beam search, compared with that of Hugging Face's transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.blend.prompts import plain, tiny_prompt
from tests.engine.engines import BLOCK_SIZE, DEMO, demo_prompt, engine, greedy, hf_model, ids_of, run, tiny_model
from vllm_blend.entrypoints import beam_search
from vllm_blend.entrypoints.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from vllm_blend.inputs import ParsedPrompt

TINY = tiny_model("llama")
EXACT: dict[str, Any] = {"device": "cpu", "dtype": "float32", "attention_backend": "auto"}  # wherever the tests run
ENDS = (1, 201)  # the end-of-sequence token, and the line break that ends an answer of the demo model


def reference(ids: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """Return the sequences that transformers finds, and their scores, for a search without a length penalty."""
    model, tokens = hf_model(DEMO), torch.tensor([ids])
    assert params.length_penalty == 0
    with torch.no_grad():
        found = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            do_sample=False,
            num_beams=params.beam_width,
            num_return_sequences=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=0.0,
            early_stopping="never",  # the search goes on while its result can become better
            eos_token_id=-1 if params.ignore_eos else list(ENDS),
            return_dict_in_generate=True,
            output_scores=True,
        )
    padding = model.generation_config.pad_token_id
    sequences = [[token for token in row if token != padding] for row in found.sequences.tolist()]
    return list(zip(sequences, found.sequences_scores.tolist(), strict=True))


def tokens_of(outputs: list[BeamSearchOutput]) -> list[list[list[int]]]:
    return [[sequence.tokens for sequence in output.sequences] for output in outputs]


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_sequences_are_those_of_transformers(ignore_eos: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in a batch of every kind of prompt, with and without a limit to the concurrency."""
    params = BeamSearchParams(3, 12, ignore_eos=ignore_eos, length_penalty=0.0)
    with engine(DEMO, **EXACT) as llm:
        monkeypatch.setattr(llm.llm_engine, "eos_token_ids", set(ENDS))
        tokenizer = llm.get_tokenizer()
        texts = [str(tokenizer.decode(ids_of(llm, demo_prompt(index, 2))[1:])) for index in range(4)]
        ids = [tokenizer.encode(text) for text in texts]
        prompts: list[Any] = [texts[0], {"prompt": texts[1]}, ids[2], {"prompt_token_ids": ids[3]}]
        outputs = llm.beam_search(prompts, params)
        ended = 0
        for output, prompt in zip(outputs, ids, strict=True):
            expected = reference(prompt, params)
            assert [sequence.tokens for sequence in output.sequences] == [tokens for tokens, _ in expected]
            for sequence, (tokens, score) in zip(output.sequences, expected, strict=True):
                assert sequence.cum_logprob == pytest.approx(score, abs=1e-3)
                generated = tokens[len(prompt) :]
                chosen = [entry[token] for entry, token in zip(sequence.logprobs, generated, strict=True)]
                assert sequence.cum_logprob == pytest.approx(sum(one.logprob for one in chosen))
                assert all(len(entry) == 2 * params.beam_width for entry in sequence.logprobs)
                stops = not ignore_eos and tokens[-1] in ENDS
                assert (sequence.finish_reason, sequence.stop_reason) == (
                    ("stop", tokens[-1]) if stops else ("length", None)
                )
                assert sequence.text == tokenizer.decode(tokens[:-1] if stops else tokens)
                ended += stops
        assert (ended == 0) == ignore_eos
        assert tokens_of(llm.beam_search(prompts, params, concurrency_limit=3, use_tqdm=True)) == tokens_of(outputs)
        assert tokens_of(llm.beam_search(prompts[2], params)) == tokens_of(outputs[2:3])


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 4.0])
def test_a_search_ends_when_its_result_is_certain(length_penalty: float, monkeypatch: pytest.MonkeyPatch) -> None:
    params = BeamSearchParams(2, 16, length_penalty=length_penalty, include_stop_str_in_output=True)
    with engine(DEMO, **EXACT) as llm:
        monkeypatch.setattr(llm.llm_engine, "eos_token_ids", set(ENDS))
        prompts = [ids_of(llm, demo_prompt(index, 2)) for index in range(2)]
        steps: list[int] = []
        complete = llm.generate

        def counting(batch: Any, *arguments: Any, **options: Any) -> Any:
            steps.append(len(batch))
            return complete(batch, *arguments, **options)

        monkeypatch.setattr(llm, "generate", counting)
        outputs = llm.beam_search(prompts, params)
        early = sum(steps)
        steps.clear()
        monkeypatch.setattr(beam_search, "_is_decided", lambda search, params: False)
        assert tokens_of(outputs) == tokens_of(llm.beam_search(prompts, params))
        assert early < sum(steps) if length_penalty <= 1 else early <= sum(steps)
        for output in outputs:
            lengths = [len(each.tokens) - (each.finish_reason == "stop") for each in output.sequences]
            scores = [
                each.cum_logprob / length**length_penalty
                for each, length in zip(output.sequences, lengths, strict=True)
            ]
            assert scores == sorted(scores, reverse=True)
            for each in output.sequences:
                assert each.text == llm.get_tokenizer().decode(each.tokens)


def test_a_length_penalty_counts_the_prompt_but_not_the_end_and_may_favour_a_beam_later() -> None:
    ended = [BeamSearchSequence([7] * 10 + [1], cum_logprob=-1.0, finish_reason="stop") for _ in range(2)]
    beam = BeamSearchSequence([7] * 10, cum_logprob=-1.5)
    assert [each.score(2.0) for each in (*ended, beam)] == [-0.01, -0.01, -0.015]
    search = beam_search._Search(ParsedPrompt([7]), max_length=20, beams=[beam], ended=ended)
    for penalty, decided in ((-1.0, True), (0.0, True), (2.0, False)):
        assert beam_search._is_decided(search, BeamSearchParams(2, 19, length_penalty=penalty)) == decided


def test_beams_end_where_the_context_does_and_need_no_tokenizer() -> None:
    params = BeamSearchParams(2, 50, ignore_eos=True)
    with engine(TINY, skip_tokenizer_init=True, max_num_seqs=3) as llm:
        prompts: list[Any] = [plain(tiny_prompt()), tiny_prompt()]
        for prompt in prompts:  # without blending, chunks are computed as plain text
            [output] = llm.beam_search([prompt], params)
            assert [len(sequence.tokens) for sequence in output.sequences] == [96, 96]
            assert all(each.text is None and each.finish_reason == "length" for each in output.sequences)
        assert llm.beam_search([], params) == []
        [output] = llm.beam_search([5, 6, 7], BeamSearchParams(500, 1))  # of a vocabulary that has fewer tokens
        assert len({tuple(sequence.tokens) for sequence in output.sequences}) == llm.llm_engine.hf_config.vocab_size
        [output] = llm.beam_search([5, 6, 7], BeamSearchParams(1, 4, temperature=100.0))
        assert {len(entry) for entry in output.sequences[0].logprobs} <= {2, 3}  # with the token that was drawn


def test_what_cannot_be_searched_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    params = BeamSearchParams(2, 2)
    good: list[Any] = [[5, 6]]
    refused: list[tuple[type[Exception], str, list[Any], dict[str, Any]]] = [
        (ValueError, r"prompts\[1\] would be blended", [*good, tiny_prompt()], {}),
        (ValueError, "max_model_len=96", [*good, [5] * 96], {}),
        (ValueError, "outside the vocabulary|out of vocabulary", [*good, [10**6]], {}),
        (
            ValueError,
            "beam_width=4 needs the log-probabilities of 8 tokens.*6",
            good,
            {"params": BeamSearchParams(4, 2)},
        ),
        (ValueError, "concurrency_limit=0", good, {"concurrency_limit": 0}),
        (ValueError, "lora_request='x'", good, {"lora_request": "x"}),
        (TypeError, "params is a dict: give BeamSearchParams", good, {"params": {"beam_width": 2}}),
        (TypeError, "prompts is an int", 7, {}),  # type: ignore[list-item]
    ]
    with engine(TINY, enable_blending=True, blend_min_tokens=1, max_logprobs=6) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(llm, "generate", lambda *_, **__: pytest.fail("a request was made"))
            for error, message, prompts, options in refused:
                with pytest.raises(error, match=message):
                    llm.beam_search(prompts, **{"params": params, **options})
            llm.llm_engine.decoder.cache_fuse_metadata["check"] = True
            with pytest.raises(ValueError, match=r"prompts\[0\] would be blended"):
                llm.beam_search(good, params)
            llm.llm_engine.decoder.cache_fuse_metadata["check"] = False
        assert len(llm.beam_search(good, params)[0].sequences) == 2


def test_requests_of_a_search_have_its_salt_and_a_failed_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    params, ids = BeamSearchParams(2, 2), list(range(5, 25))
    salted: Any = {"prompt_token_ids": ids, "cache_salt": "one tenant's"}
    with engine(TINY, block_size=BLOCK_SIZE) as llm:
        llm.beam_search(salted, params)
        cached = [run(llm, prompt, greedy(1))[0].num_cached_tokens for prompt in (ids, salted)]
        assert cached[0] == 0 and cached[1]
        failed = [replace(output, error="out of order") for output in run(llm, ids, greedy(1))]
        monkeypatch.setattr(llm, "generate", lambda *_, **__: failed)
        with pytest.raises(RuntimeError, match=r"one of its requests failed: out of order"):
            llm.beam_search(ids, params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 0}, "beam_width=0 must be at least 1"),
        ({"beam_width": True}, "beam_width=True must be a whole number"),
        ({"max_tokens": 0}, "max_tokens=0 must be at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0 must be at least 0"),
        ({"length_penalty": float("nan")}, "length_penalty=nan must be a finite number"),
        ({"ignore_eos": "no"}, "ignore_eos='no' must be True or False"),
    ],
)
def test_parameters_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **options})
