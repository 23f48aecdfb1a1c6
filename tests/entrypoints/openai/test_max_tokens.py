"""How many tokens an answer may have, by what is asked, what the model's defaults say, and what the context leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_blend.entrypoints.openai.errors import APIError
from vllm_blend.entrypoints.openai.sampling import resolve_max_tokens

pytestmark = pytest.mark.cpu_only


def engine(**settings: Any) -> Any:
    return SimpleNamespace(max_model_len=100, default_sampling_settings=settings)


@pytest.mark.parametrize(
    ("asked", "default", "settings", "num_prompt_tokens", "resolved"),
    [
        (10, 16, {}, 90, 10),  # all that is left
        (1, 16, {"max_tokens": 5}, 99, 1),
        (None, 16, {}, 50, 16),
        (None, 16, {}, 90, 10),  # the default, as far as the context allows
        (None, None, {}, 90, 10),
        (None, 16, {"max_tokens": 5}, 50, 5),
        (None, 16, {"max_tokens": 500}, 90, 10),
    ],
)
def test_an_answer_gets_what_is_asked_for_or_what_the_context_leaves(
    asked: int | None, default: int | None, settings: dict[str, Any], num_prompt_tokens: int, resolved: int
) -> None:
    assert resolve_max_tokens(asked, "max_tokens", default, num_prompt_tokens, engine(**settings)) == resolved


@pytest.mark.parametrize(
    ("asked", "num_prompt_tokens", "says"), [(11, 90, "ask for at most 10"), (None, 100, "the prompt has 100 tokens")]
)
def test_what_does_not_fit_the_context_is_refused(asked: int | None, num_prompt_tokens: int, says: str) -> None:
    with pytest.raises(APIError, match=says) as caught:
        resolve_max_tokens(asked, "max_tokens", 16, num_prompt_tokens, engine())
    assert (caught.value.status_code, caught.value.code) == (400, "context_length_exceeded")
