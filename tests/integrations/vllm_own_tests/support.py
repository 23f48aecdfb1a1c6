"""What a few of vLLM's own tests use of its test support, written for this package.

`prepare.py` copies this file beside them: as their conftest (fixtures), as their `tests.utils`, and in place of the
module from which two of them take the names of pictures. Every model they name is the one in VLLM_OWN_TESTS_MODEL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from vllm import LLM, SamplingParams

MODEL = os.environ["VLLM_OWN_TESTS_MODEL"]
POSITIONS = 1024  # that it has
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
            model, dtype=dtype, max_model_len=max_model_len, trust_remote_code=True, seed=0, swap_space=4, **arguments
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

    def generate_w_logprobs(self, prompts: list[str], sampling_params: SamplingParams) -> list[tuple[Any, ...]]:
        """Return tokens, text, log-probabilities and those of the prompt, prompt by prompt."""
        outputs = self.llm.generate([{"prompt": prompt} for prompt in prompts], sampling_params)
        last = [(output.outputs[-1], output.prompt_logprobs) for output in outputs]
        return [(each.token_ids, each.text, each.logprobs, of_prompt) for each, of_prompt in last]


@pytest.fixture(scope="session")
def vllm_runner() -> type[VllmRunner]:
    return VllmRunner
