"""`LLM` as people call it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from tqdm import tqdm

from tests.blend.prompts import tiny_prompt
from tests.engine.engines import engine, greedy, new_llm, run, tiny_model, tokens_of
from vllm_blend import RequestOutput, SamplingParams, detokenizer
from vllm_blend.outputs import FlatLogprobs, Logprob
from vllm_blend.unsupported.llm_methods import UNSUPPORTED_LLM_METHODS

TINY = tiny_model("llama")
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def test_outputs_come_in_the_order_of_the_prompts() -> None:
    """They do although the later ones finish first."""
    prompts = ["The quick brown fox", "jumps", "over"]
    params = [greedy(20, ignore_eos=True), greedy(9, ignore_eos=True), greedy(1, ignore_eos=True)]
    with engine(TINY, max_num_seqs=2) as llm:
        outputs = run(llm, prompts, params)
        assert [output.prompt for output in outputs] == prompts
        assert [len(output.outputs[0].token_ids) for output in outputs] == [20, 9, 1]
        assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
        tokenizer = llm.get_tokenizer()
        for output in outputs:
            assert output.prompt_token_ids == tokenizer.encode(str(output.prompt))
            assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids, skip_special_tokens=True)


def test_its_repr_is_a_line() -> None:
    with engine(TINY) as llm:
        device = llm.llm_engine.model_executor.driver_worker.device
        dtype = str(llm.llm_engine.model_config.dtype).removeprefix("torch.")
        assert repr(llm) == f"LLM({TINY!r}, {dtype} on {device})"
    options = {"enable_blending": True, "blend_selector": "first_tokens", "blend_recompute_ratio": 0.2}
    with engine(TINY, cascade_attention=True, **options) as llm:
        assert repr(llm).endswith(", blends by first_tokens at 0.2, cascade_attention)")


def test_a_prompt_may_be_text_a_dict_or_ids() -> None:
    with engine(TINY) as llm:
        text = "over the lazy dog"
        ids = llm.get_tokenizer().encode(text)
        kinds = [text, {"prompt": text}, {"prompt_token_ids": ids}, ids, tuple(ids)]
        one_by_one = [run(llm, kind, greedy(4))[0] for kind in kinds]
        assert len({tuple(output.outputs[0].token_ids) for output in one_by_one + run(llm, kinds, greedy(4))}) == 1


def test_arguments_of_vllms_generate() -> None:
    with engine(TINY) as llm:
        expected = tokens_of(run(llm, [[5, 6], [7]], greedy(4)))
        with pytest.warns(DeprecationWarning, match="prompt_token_ids"):
            outputs = llm.generate(prompt_token_ids=[[5, 6], [7]], sampling_params=greedy(4), use_tqdm=False)
        assert tokens_of(outputs) == expected
        bars: list[tqdm] = []

        def new_bar(**options: Any) -> tqdm:
            bars.append(tqdm(**options, file=io.StringIO()))
            return bars[-1]

        options: dict[str, Any] = {"use_tqdm": new_bar, "lora_request": None, "priority": [0, 0]}
        assert tokens_of(llm.generate([[5, 6], [7]], greedy(4), **options)) == expected
        assert [(bar.total, bar.n) for bar in bars] == [(2, 2)]
        refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
            (ValueError, "lora_request='x': LoRA adapters are not supported", {"lora_request": "x"}),
            (ValueError, "1 priorities for 2 prompts", {"priority": [0]}),
            (ValueError, "0 priorities for 2 prompts", {"priority": []}),
            (ValueError, "priority=1, but the engine serves.*scheduling_policy", {"priority": [1, 2]}),
            (TypeError, "priority='high' must be an integer", {"priority": ["high", "low"]}),
            (ValueError, "prompts and prompt_token_ids are both given", {"prompt_token_ids": [[1]]}),
        ]
        for error, message, arguments in refused:
            with pytest.raises(error, match=message):
                llm.generate([[5, 6], [7]], greedy(4), use_tqdm=False, **arguments)


def test_methods_that_vllm_has_beyond_these_are_refused_by_name() -> None:
    vllm = "encode embed classify reward score sleep wake_up start_profile stop_profile preprocess_chat reset_mm_cache"
    vllm += " enqueue enqueue_chat wait_for_completion get_world_size init_weight_transfer_engine update_weights"
    assert sorted(vllm.split()) == sorted(UNSUPPORTED_LLM_METHODS)
    with engine(TINY) as llm:
        for name, reason in UNSUPPORTED_LLM_METHODS.items():
            with pytest.raises(NotImplementedError) as refusal:
                getattr(llm, name)(["a prompt"], use_tqdm=False)
            assert str(refusal.value) == f"LLM.{name} is not supported: {reason}"


def test_prompts_run_in_order_of_priority() -> None:
    with engine(TINY, scheduling_policy="priority", max_num_seqs=1) as llm:
        outputs = llm.generate([[5], [6], [7]], greedy(3), use_tqdm=False, priority=[2, -1, 0])
        started = [output.metrics.first_scheduled_time for output in outputs if output.metrics is not None]
        assert sorted(range(3), key=lambda index: started[index] or 0.0) == [1, 2, 0]
    with pytest.raises(ValueError, match="scheduling_policy='lifo' is unknown: use one of"):
        new_llm(TINY, scheduling_policy="lifo")


def test_vllms_defaults() -> None:
    with engine(TINY) as llm:
        [output] = llm.generate("The quick", use_tqdm=False)
        assert len(output.outputs[0].token_ids) <= 16
        assert output.outputs[0].logprobs is None
        assert output.outputs[0].cumulative_logprob is None


def test_chat_renders_the_template() -> None:
    with engine(TINY) as llm:
        conversation = [{"role": "user", "content": "Where did the dog go?"}]
        rendered = "<s>user: Where did the dog go?\nA:"
        for messages in (conversation, [conversation]):
            [output] = llm.chat(messages, greedy(4), use_tqdm=False, chat_template=TEMPLATE)
            assert output.prompt == rendered
            assert output.prompt_token_ids == llm.get_tokenizer().encode(rendered, add_special_tokens=False)
        two = llm.chat([conversation, conversation * 2], greedy(4), use_tqdm=False, chat_template=TEMPLATE)
        assert len(two) == 2
        assert len(two[1].prompt_token_ids) > len(two[0].prompt_token_ids)


def test_steps_stream_what_is_known() -> None:
    """`add_request` and `step`: one more token in every output, the last one finished."""
    with engine(TINY) as llm:
        expected = run(llm, "The quick brown fox", greedy(6, ignore_eos=True))[0].outputs[0]
        inner = llm.llm_engine
        inner.add_request("a", "The quick brown fox", greedy(6, ignore_eos=True))
        seen: list[RequestOutput] = []
        while inner.has_unfinished_requests():
            assert inner.get_num_unfinished_requests() == 1
            seen += inner.step()
        assert [len(output.outputs[0].token_ids) for output in seen] == [1, 2, 3, 4, 5, 6]
        assert [output.finished for output in seen] == [False] * 5 + [True]
        assert all(expected.text.startswith(output.outputs[0].text) for output in seen)
        assert seen[-1].outputs[0].text == expected.text


def test_stop_strings_end_a_request() -> None:
    with engine(TINY) as llm:
        whole = run(llm, "The quick", greedy(12, ignore_eos=True))[0].outputs[0].text
        stop = whole[4:6]
        [output] = run(llm, "The quick", greedy(12, ignore_eos=True, stop=[stop]))
        completion = output.outputs[0]
        assert completion.text == whole[: whole.index(stop)]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def without_text(output: RequestOutput) -> RequestOutput:
    """Return the output without the text that a tokenizer gives it."""

    def bare(entries: Sequence[dict[int, Logprob] | None] | None) -> Any:
        return [entry and {k: replace(v, decoded_token=None) for k, v in entry.items()} for entry in entries or ()]

    [completion] = output.outputs
    completion = replace(completion, text="", logprobs=bare(completion.logprobs))
    return replace(output, outputs=[completion], prompt_logprobs=bare(output.prompt_logprobs), metrics=None)


def test_nothing_is_decoded_unless_text_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"logprobs": 2, "prompt_logprobs": 2, "ignore_eos": True}
    with engine(TINY) as llm:
        [whole] = run(llm, [[5, 6, 7]], greedy(6, **options))
        monkeypatch.setattr(detokenizer, "_decode_function", lambda *_: pytest.fail("something was decoded"))
        [plain] = run(llm, [[5, 6, 7]], greedy(6, detokenize=False, **options))
    assert whole.outputs[0].text and plain.outputs[0].text == ""
    assert replace(plain, request_id=whole.request_id, metrics=None) == without_text(whole)


def test_an_engine_without_a_tokenizer() -> None:
    with engine(TINY) as llm:
        [expected] = run(llm, [[5, 6, 7]], greedy(6, logprobs=2))
    with engine(TINY, skip_tokenizer_init=True, enable_blending=True) as llm:
        assert llm.llm_engine.tokenizer is None
        [output] = run(llm, [[5, 6, 7]], greedy(6, logprobs=2))
        assert replace(output, request_id=expected.request_id, metrics=None) == replace(
            without_text(expected), prompt_logprobs=None
        )
        assert run(llm, tiny_prompt(), greedy(2))[0].blend is not None
        refused: list[tuple[str, Callable[[], Any]]] = [
            ("prompt is text, but the engine has no tokenizer: give token ids", lambda: run(llm, "text", greedy(2))),
            (r"stop=\['a'\] needs a tokenizer", lambda: run(llm, [[5]], greedy(2, stop=["a"]))),
            (r"bad_words=\['a'\] needs a tokenizer", lambda: run(llm, [[5]], greedy(2, bad_words=["a"]))),
            ("the engine has no tokenizer", llm.get_tokenizer),
            ("the engine has no tokenizer", lambda: llm.chat([{"role": "user", "content": "a"}], greedy(2))),
        ]
        for message, call in refused:
            with pytest.raises(ValueError, match=message):
                call()


def test_chunks_are_encoded_with_the_priority_of_the_most_urgent_prompt_that_waits_for_them() -> None:
    """A lazy prompt's encodings come after a usual prompt, unless an urgent one has come to wait for them too."""
    blended: Any = {"prefix": [3] * 30, "chunks": [[5] * 12], "suffix": [7]}
    prompts: dict[str, tuple[Any, int]] = {"lazy": (blended, 5), "usual": ([6] * 30, 1), "urgent": (blended, 0)}
    for names, expected in (
        (["lazy", "usual"], [("usual", 0), ("lazy", 2)]),
        (["lazy", "usual", "urgent"], [("urgent", 2), ("usual", 2), ("lazy", 2)]),
    ):
        with engine(TINY, enable_blending=True, scheduling_policy="priority", max_num_seqs=1) as llm:
            inner, ended = llm.llm_engine, []
            before = inner.composer.num_encoded
            for name in names:
                inner.add_request(name, prompts[name][0], greedy(2), final_only=True, priority=prompts[name][1])
            while inner.has_unfinished_requests():
                ended += [(output.request_id, inner.composer.num_encoded - before) for output in inner.step()]
            assert ended == expected


def test_the_model_is_where_scripts_look_for_it() -> None:
    with engine(TINY) as llm:
        model = llm.llm_engine.model_executor.driver_worker.model_runner.model
        assert llm.apply_model(id) == [id(model)]
        assert llm.apply_model(lambda each: sum(p.numel() for p in each.parameters()))[0] > 0
        assert llm.collective_rpc(lambda worker, add: worker.rank + add, args=(5,)) == [5]
        assert llm.collective_rpc("__eq__", args=(llm.llm_engine.model_executor.driver_worker,)) == [True]
        with pytest.raises(ValueError, match=r"timeout=1\.0: the call runs in this process"):
            llm.collective_rpc("profile", timeout=1.0)
        lock = llm.llm_engine.lock  # no step runs meanwhile in another thread
        assert llm.apply_model(lambda each: lock.held) == [True] == llm.collective_rpc(lambda worker: lock.held)


def test_metrics_count_tokens() -> None:
    llm = new_llm(TINY, max_num_seqs=4)
    run(llm, [{"prompt_token_ids": [1] * 40}], SamplingParams(max_tokens=5, ignore_eos=True))
    run(llm, [{"prompt_token_ids": [1] * 40}], SamplingParams(max_tokens=5, ignore_eos=True))
    values = {metric.name: metric.value for metric in llm.get_metrics()}
    assert values["vllm:prompt_tokens"] == values["vllm:prefix_cache_queries"] == 80
    assert values["vllm:prefix_cache_hits"] == 32
    assert values["vllm:generation_tokens"] == 10
    assert values["vllm:request_success_length"] == 2
    assert values["vllm_blend:num_steps"] == 10
    assert values["vllm:kv_cache_usage_perc"] == pytest.approx(0.0)


def test_flat_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"logprobs": 2, "prompt_logprobs": 1}
    with engine(TINY) as llm:
        [listed] = run(llm, [[5, 6, 7]], greedy(4, **options))
        [flat] = run(llm, [[5, 6, 7]], greedy(4, flat_logprobs=True, **options))
        monkeypatch.setenv("VLLM_FLAT_LOGPROBS", "1")
        [by_default] = run(llm, [[5, 6, 7]], greedy(4, **options))
        [without] = run(llm, [[5, 6, 7]], SamplingParams(max_tokens=1))
    assert isinstance(listed.outputs[0].logprobs, list) and isinstance(listed.prompt_logprobs, list)
    for output in (flat, by_default):
        assert output.outputs[0].logprobs == FlatLogprobs.from_positions(listed.outputs[0].logprobs)
        assert output.prompt_logprobs == FlatLogprobs.from_positions(listed.prompt_logprobs)
        assert output.outputs[0].cumulative_logprob == listed.outputs[0].cumulative_logprob
    assert without.outputs[0].logprobs is None and without.prompt_logprobs is None
    assert SamplingParams().flat_logprobs and not SamplingParams(flat_logprobs=False).flat_logprobs
    monkeypatch.setenv("VLLM_FLAT_LOGPROBS", "yes")
    with pytest.raises(ValueError, match="VLLM_FLAT_LOGPROBS='yes' must be 0 or 1"):
        SamplingParams()
