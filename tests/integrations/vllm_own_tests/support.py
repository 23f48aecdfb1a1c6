"""What a few of vLLM's own tests use of its test support, written for this package.

`prepare.py` copies this file beside them: as their conftest (fixtures), as their `tests.utils`, and in place of the
module from which two of them take the names of pictures. Every model they name is the one in VLLM_OWN_TESTS_MODEL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

MODEL = os.environ["VLLM_OWN_TESTS_MODEL"]
POSITIONS = 1024  # that it has
DTYPES = {"half": "float32"}  # in float16, two implementations differ by more than some beams of the stand-in do
NO_AUDIO = ModuleType("vllm.assets.audio")  # which the file about beam search imports for a test that cannot run
NO_AUDIO.AudioAsset = None  # type: ignore[attr-defined]
sys.modules["vllm.assets"], sys.modules["vllm.assets.audio"] = ModuleType("vllm.assets"), NO_AUDIO
TEST_IMAGE_ASSETS = ["first.png", "second.png"]  # no test that opens them can run: there are no multimodal models


def create_new_process_for_each_test() -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that changes nothing: an engine ends with its last reference here."""
    return lambda function: function


def stand_in(model: str) -> str:
    """Return the folder of the model that stands for this one."""
    return MODEL + "-without-bos" if "gpt2" in model else MODEL


@pytest.fixture(autouse=True)
def _target_of_bad_words(request: pytest.FixtureRequest) -> None:
    """Have the test of a one-token bad word expect what the stand-in writes, in place of what vLLM's model does."""
    if request.cls is not None and request.cls.__name__ == "TestOneTokenBadWord":
        [output] = LLM(request.cls.MODEL).generate(request.cls.PROMPT, SamplingParams(temperature=0))
        request.cls.TARGET_TOKEN = AutoTokenizer.from_pretrained(MODEL).decode(output.outputs[0].token_ids[:1])
        request.instance.setup_method(request.function)


@pytest.fixture(autouse=True)
def _cpu_is_a_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test of collective RPC, which counts GPUs, run on the CPU where there is none."""
    if request.path.stem == "test_collective_rpc" and torch.cuda.device_count() == 0:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


@pytest.fixture(scope="session", autouse=True)
def _stand_in_model() -> Iterator[None]:
    """Load the stand-in wherever a test names a model that has to be downloaded."""
    own_init, load_tokenizer = LLM.__init__, AutoTokenizer.from_pretrained

    def init(self: LLM, model: str, *args: Any, max_model_len: int | None = None, **arguments: Any) -> None:
        own_init(self, stand_in(model), *args, max_model_len=min(max_model_len or POSITIONS, POSITIONS), **arguments)

    def from_pretrained(name: str, *args: Any, **options: Any) -> Any:
        return load_tokenizer(name if os.path.isdir(name) else stand_in(name), *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "__init__", init)
        patch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
        yield


@pytest.fixture
def example_prompts() -> list[str]:
    return (Path(__file__).parent / "prompts" / "example.txt").read_text().splitlines(keepends=True)


@pytest.fixture
def num_gpus_available() -> int:
    return torch.cuda.device_count()


class VllmRunner:
    """An engine in a `with` statement, as vLLM's tests use it."""

    def __init__(self, model: str, dtype: str = "auto", max_model_len: int = 1024, **arguments: Any) -> None:
        self.llm = LLM(
            model,
            dtype=DTYPES.get(dtype, dtype),
            max_model_len=max_model_len,
            trust_remote_code=True,
            seed=0,
            swap_space=4,
            **arguments,
        )

    def __enter__(self) -> VllmRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        del self.llm

    def generate(self, prompts: list[str], sampling_params: SamplingParams) -> list[tuple[list[list[int]], list[str]]]:
        """Return the token ids and the texts of every completion, each with its prompt."""
        outputs = self.llm.generate([{"prompt": prompt} for prompt in prompts], sampling_params)
        return [
            (
                [[*output.prompt_token_ids, *completion.token_ids] for completion in output.outputs],
                [(output.prompt or "") + completion.text for completion in output.outputs],
            )
            for output in outputs
        ]

    def generate_beam_search(
        self, prompts: list[str], beam_width: int, max_tokens: int, concurrency_limit: int | None = None
    ) -> list[tuple[list[list[int]], list[str | None]]]:
        """Return the token ids and the texts of the sequences that are found for each prompt."""
        params = BeamSearchParams(beam_width=beam_width, max_tokens=max_tokens)
        outputs = self.llm.beam_search([{"prompt": each} for each in prompts], params, None, False, concurrency_limit)
        found = [output.sequences for output in outputs]
        return [([each.tokens for each in sequences], [each.text for each in sequences]) for sequences in found]

    def generate_w_logprobs(self, prompts: list[str], sampling_params: SamplingParams) -> list[tuple[Any, ...]]:
        """Return tokens, text, log-probabilities and those of the prompt, prompt by prompt."""
        outputs = self.llm.generate([{"prompt": prompt} for prompt in prompts], sampling_params)
        last = [(output.outputs[-1], output.prompt_logprobs) for output in outputs]
        return [(each.token_ids, each.text, each.logprobs, of_prompt) for each, of_prompt in last]


@pytest.fixture(scope="session")
def vllm_runner() -> type[VllmRunner]:
    return VllmRunner


class HfRunner:
    """A model of transformers in a `with` statement, as vLLM's tests use it."""

    def __init__(self, model: str, dtype: str, **_: Any) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(stand_in(model), dtype=DTYPES.get(dtype, dtype)).eval()

    def __enter__(self) -> HfRunner:
        return self

    def __exit__(self, *exception: object) -> None:
        del self.model

    @torch.inference_mode()
    def generate_beam_search(
        self, prompts: list[str], beam_width: int, max_tokens: int
    ) -> list[tuple[list[list[int]], list[str]]]:
        """Return the token ids and the texts of the sequences that are found for each prompt."""
        found = []
        for prompt in prompts:
            rows = self.model.generate(
                **self.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False),
                do_sample=False,
                max_new_tokens=max_tokens,
                num_beams=beam_width,
                num_return_sequences=beam_width,
            ).tolist()
            found.append((rows, self.tokenizer.batch_decode(rows)))
        return [([_without_padding(row, self.tokenizer) for row in rows], texts) for rows, texts in found]


def _without_padding(row: list[int], tokenizer: Any) -> list[int]:
    return [token for token in row if token != tokenizer.pad_token_id]


@pytest.fixture(scope="session")
def hf_runner() -> type[HfRunner]:
    return HfRunner
