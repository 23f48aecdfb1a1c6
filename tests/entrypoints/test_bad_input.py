"""What users get wrong is a clear error that names the field and the fix, and costs no other request anything."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.blend.prompts import tiny_prompt
from tests.engine.engines import TINY_VOCABULARY, assert_empty, engine, greedy, new_llm, run, tiny_model, tokens_of
from tests.models.tiny import edit_config
from vllm_blend import SamplingParams
from vllm_blend.attention.torch_native import TorchNativeBackend

TINY = tiny_model("llama")
GOOD: Any = {"prompt_token_ids": [5, 6, 7]}
V = TINY_VOCABULARY


def broken_model(tmp_path: Path, fault: str) -> str:
    directory = tmp_path / "model"
    shutil.copytree(TINY, directory)
    weights = directory / "model.safetensors"
    if fault == "no config":
        (directory / "config.json").unlink()
    elif fault == "config is not JSON":
        (directory / "config.json").write_text("{")
    elif fault == "unknown architecture":
        edit_config(directory, architectures=["MambaForCausalLM"], model_type="mamba")
    elif fault == "no weights":
        weights.unlink()
    elif fault == "truncated weights":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif fault == "another shape":
        edit_config(directory, intermediate_size=96)
    elif fault == "no tokenizer":
        for path in directory.glob("tokenizer*"):
            path.unlink()
    return str(directory)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("no config", r"config\.json"),
        ("config is not JSON", r"config\.json"),
        ("unknown architecture", "(?s)(mamba|Mamba).*LlamaForCausalLM"),
        ("no weights", "safetensors"),
        ("truncated weights", r"model\.safetensors"),
        ("another shape", "mlp"),
        ("no tokenizer", "no tokenizer could be loaded"),
    ],
)
def test_broken_model_directories(tmp_path: Path, fault: str, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        new_llm(broken_model(tmp_path, fault))


def test_a_missing_model_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        new_llm(str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blend_selector": "nonesuch"}, "blend_selector='nonesuch' is unknown.*question_attention"),
        ({"blend_recompute_ratio": 1.5}, r"blend_recompute_ratio=1\.5 is a share"),
        ({"blend_recompute_ratio": -0.1}, r"blend_recompute_ratio=-0\.1 is a share"),
        ({"blend_recompute_ratio": "half"}, "blend_recompute_ratio='half'"),
        ({"blend_check_layers": []}, "blend_check_layers is empty"),
        ({"blend_check_layers": [0]}, r"blend_check_layers=\[0\].*from 1 on"),
        ({"blend_check_layers": [2, 1]}, r"blend_check_layers=\[2, 1\].*ascending"),
        ({"blend_check_layers": [1, 2], "blend_recompute_ratios": [0.5]}, "1 entries for 2 check layers"),
        ({"blend_check_layers": [1, 2], "blend_recompute_ratios": [0.1, 0.5]}, r"\[0\.1, 0\.5\] rise"),
        ({"blend_recompute_ratio": 0.1, "blend_recompute_ratios": [0.5]}, "both given"),
        ({"blend_min_tokens": -1}, "blend_min_tokens=-1"),
        ({"blend_chunk_cache_gib": 0}, "blend_chunk_cache_gib=0"),
        ({"block_size": 5}, "block_size=5"),
        ({"block_size": 16.0}, r"block_size=16\.0 must be a whole number"),
        ({"gpu_memory_utilization": 0.0}, r"gpu_memory_utilization=0\.0"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan must be a finite number"),
        ({"gpu_memory_utilization": "0.5"}, r"gpu_memory_utilization='0\.5' must be a finite number, not str"),
        ({"gpu_memory_utilization": None}, "gpu_memory_utilization=None must be a finite number"),
        ({"num_gpu_blocks_override": 1}, "num_gpu_blocks_override=1"),
        ({"num_gpu_blocks_override": "64"}, "num_gpu_blocks_override='64' must be a whole number or None"),
        ({"num_gpu_blocks_override": 64.5}, r"num_gpu_blocks_override=64\.5 must be a whole number"),
        ({"num_gpu_blocks_override": 5}, "room for 64 tokens.*max_model_len=96.*raise num_gpu_blocks_override"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "max_num_batched_tokens=7 is below max_num_seqs=8"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_logprobs": -2}, "max_logprobs=-2 must be a whole number of at least -1"),
        ({"max_model_len": 97}, "max_model_len=97 is above the 96 positions"),
        ({"dtype": "int4"}, "dtype='int4'.*bfloat16"),
        ({"device": "tpu"}, "tpu"),
        ({"device": None}, "device=None must be a string or a torch.device"),
        ({"load_format": "pickle"}, "load_format='pickle'"),
        ({"attention_backend": "paged_magic"}, "attention_backend='paged_magic'.*torch_native"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be a whole number of at least 1"),
    ],
)
def test_engine_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_llm(TINY, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"blend_selector": "none", "blend_recompute_ratio": 0.5}, r"'none' always recomputes a share of 0\.0"),
        ({"blend_selector": "full", "blend_recompute_ratio": 0.5}, r"'full' always recomputes a share of 1\.0"),
        ({"blend_selector": "value_deviation", "blend_check_layers": [3]}, r"check_layers=\[3\].*layers 0\.\.2"),
        ({"blend_selector": "first_tokens", "blend_recompute_ratios": [0.2]}, "'first_tokens' checks none"),
    ],
)
def test_blend_settings_that_exclude_each_other(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_llm(TINY, enable_blending=True, **arguments)


def test_pages_smaller_than_the_attention_backend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchNativeBackend, "smallest_block", 32)
    with pytest.raises(ValueError, match=r"'torch_native': block_size=16, but .* 32 tokens and more; raise block_size"):
        new_llm(TINY, attention_backend="torch_native")


def test_an_unknown_argument() -> None:
    with pytest.raises(TypeError, match="blend_recompute_ration"):
        new_llm(TINY, blend_recompute_ration=0.1)


LONG = [5] * 96
BAD_PROMPTS: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (5.0, TypeError, "a prompt is a str, a list of token ids or a dict, not float"),
    "a bare list with a string": ([5, "6"], TypeError, r"prompt\[1\] is '6'"),
    "an empty dict": ({}, ValueError, "needs 'prompt', 'prompt_token_ids', or"),
    "empty ids": ({"prompt_token_ids": []}, ValueError, "the decoder prompt cannot be empty"),
    "chunk as a document": (
        {"chunks": [{"page_content": "a"}], "suffix": "q"},
        TypeError,
        r"chunks\[0\] is of the type dict: give a text \(str\) or token ids \(list of int\)",
    ),
    "ids as text": ({"prompt_token_ids": "5 6"}, TypeError, "prompt_token_ids must be a list of token ids, not str"),
    "a fraction": ({"prompt_token_ids": [5, 6.5]}, TypeError, r"prompt_token_ids\[1\] is 6\.5"),
    "a string among ids": ({"prompt_token_ids": [5, "6"]}, TypeError, r"prompt_token_ids\[1\] is '6'"),
    "ids in ids": ({"prompt_token_ids": [[5, 6]]}, TypeError, r"prompt_token_ids\[0\] is \[5, 6\]"),
    "a negative id": ({"prompt_token_ids": [5, -1]}, ValueError, r"prompt_token_ids\[1\] is -1, out of vocabulary"),
    "an id too large": (
        {"prompt_token_ids": [V]},
        ValueError,
        rf"prompt_token_ids\[0\] is {V}, out of vocabulary.*{V} tokens",
    ),
    "too long": ({"prompt_token_ids": LONG}, ValueError, "the prompt has 96 tokens, but max_model_len=96"),
    "an unknown key": ({**tiny_prompt(), "sufix": [1]}, ValueError, r"unknown key\(s\) \['sufix'\]"),
    "an empty chunk": ({**tiny_prompt(), "chunks": [[1], []]}, ValueError, r"chunks\[1\] is empty"),
    "an empty text chunk": ({**tiny_prompt(), "chunks": ["some", ""]}, ValueError, r"chunks\[1\] is empty"),
    "one string of chunks": ({**tiny_prompt(), "chunks": "text"}, TypeError, "chunks must be a list"),
    "a chunk that is no chunk": (
        {**tiny_prompt(), "chunks": [None]},
        TypeError,
        r"chunks\[0\] is of the type NoneType: give a text",
    ),
    "a chunk with a wrong id": ({**tiny_prompt(), "chunks": [[1], [2, V]]}, ValueError, rf"chunks\[1\]\[1\] is {V}"),
    "an empty suffix": ({**tiny_prompt(), "suffix": []}, ValueError, "suffix is empty"),
    "no suffix": ({"prefix": [1], "chunks": [[1]]}, ValueError, "suffix is empty"),
    "chunks too long": ({**tiny_prompt(), "chunks": [LONG]}, ValueError, "max_model_len=96"),
    "an unknown selector": (tiny_prompt(blend_selector="nonesuch"), ValueError, "'nonesuch' is unknown"),
    "a selector by number": (tiny_prompt(blend_selector=3), ValueError, "blend_selector=3 must be text"),
    "a ratio above 1": (tiny_prompt(blend_recompute_ratio=1.01), ValueError, r"blend_recompute_ratio=1\.01"),
    "a ratio of text": (tiny_prompt(blend_recompute_ratio="15%"), ValueError, "blend_recompute_ratio='15%'"),
    "a contradiction": (tiny_prompt(blend_selector="full", blend_recompute_ratio=0.5), ValueError, "leave one of"),
}


@pytest.mark.parametrize("fault", BAD_PROMPTS)
def test_a_bad_prompt_raises(fault: str) -> None:
    prompt, error, message = BAD_PROMPTS[fault]
    with engine(TINY, enable_blending=True) as llm, pytest.raises(error, match=message):
        run(llm, [prompt], greedy(2))


def test_bad_prompts_in_a_batch_fail_alone() -> None:
    good: list[Any] = [GOOD, tiny_prompt(), {"prompt_token_ids": [9, 8]}]
    with engine(TINY, enable_blending=True) as llm:
        expected = tokens_of(run(llm, good, greedy(6)))
        batch = [good[0], *(prompt for prompt, _, _ in BAD_PROMPTS.values()), *good[1:]]
        outputs = run(llm, batch, greedy(6))
        assert [output.outputs[0].token_ids for output in (outputs[0], *outputs[-2:])] == expected
        for output, (_, _, message) in zip(outputs[1:-2], BAD_PROMPTS.values(), strict=True):
            assert output.finished
            assert output.outputs[0].finish_reason == "error"
            with pytest.raises(ValueError, match=message):
                raise ValueError(output.error)


def test_bad_parameters_in_a_batch_fail_alone() -> None:
    bad: dict[str, SamplingParams] = {
        "stop_token_ids names": greedy(4, stop_token_ids=[V]),
        "logit_bias names": greedy(4, logit_bias={V + 3: 1.0}),
        "allowed_token_ids names": greedy(4, allowed_token_ids=[V]),
        "logprobs=": greedy(4, logprobs=V + 1),
        "no token is left": greedy(4, allowed_token_ids=[3], stop_token_ids=[3], min_tokens=2),
    }
    with engine(TINY) as llm:
        outputs = run(llm, [GOOD] * (1 + len(bad)), [greedy(4), *bad.values()])
        assert outputs[0].error is None
        assert len(outputs[0].outputs[0].token_ids) == 4
        for output, message in zip(outputs[1:], bad, strict=True):
            assert output.error is not None
            assert message in output.error
            assert output.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
def test_more_logprobs_than_the_engine_allows(field: str) -> None:
    def params(count: int) -> SamplingParams:
        asked: dict[str, Any] = {field: count}
        return SamplingParams(temperature=0, max_tokens=1, **asked)

    with engine(TINY, max_logprobs=7) as llm:
        for count in (8, -1):
            with pytest.raises(ValueError, match=f"{field}={count}, but the engine allows 7: lower it"):
                run(llm, [GOOD], params(count))
        assert run(llm, [GOOD], params(7))[0].error is None


def test_ids_of_any_integer_type() -> None:
    with engine(TINY) as llm:
        kinds = [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), torch.tensor([5, 6, 7])]
        outputs = run(llm, [{"prompt_token_ids": ids} for ids in kinds], greedy(4))
        assert all(output.prompt_token_ids == [5, 6, 7] for output in outputs)
        assert len({tuple(tokens) for tokens in tokens_of(outputs)}) == 1


def test_one_set_of_parameters_per_prompt() -> None:
    with engine(TINY) as llm:
        with pytest.raises(ValueError, match="3 sampling_params for 2 prompts"):
            run(llm, [GOOD, GOOD], [greedy(1)] * 3)
        assert run(llm, [], greedy(1)) == []


def test_an_id_belongs_to_one_running_request() -> None:
    with engine(TINY, enable_blending=True) as llm:
        inner = llm.llm_engine
        inner.add_request("a", GOOD, greedy(3))
        with pytest.raises(ValueError, match="request_id 'a' is in use"):
            inner.add_request("a", GOOD, greedy(3))
        while inner.has_unfinished_requests():
            inner.step()
        inner.add_request("a", GOOD, greedy(1))
        inner.abort_request("a")
        assert_empty(llm)


def test_a_refused_request_leaves_nothing_behind() -> None:
    with engine(TINY, enable_blending=True) as llm:
        inner = llm.llm_engine
        for prompt, error, message in BAD_PROMPTS.values():
            with pytest.raises(error, match=message):
                inner.add_request("bad", prompt, greedy(2))
            assert_empty(llm)
        assert inner.step() == []


def test_chat_without_a_template() -> None:
    with engine(TINY) as llm, pytest.raises(ValueError, match="no chat template: give chat_template"):
        llm.chat([{"role": "user", "content": "hello"}], greedy(1), use_tqdm=False)


@pytest.mark.parametrize("setting", [{"blend_selector": "none"}, {"blend_recompute_ratio": 0.5}])
def test_blend_settings_need_an_engine_that_blends(setting: dict[str, Any]) -> None:
    with engine(TINY) as llm:
        with pytest.raises(ValueError, match="does not blend: give enable_blending=True to the engine"):
            run(llm, tiny_prompt() | setting, greedy(1))
        assert_empty(llm)
