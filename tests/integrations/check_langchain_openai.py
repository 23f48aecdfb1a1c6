"""`ChatOpenAI` of langchain-openai under LangChain's own tests for chat models."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.integrations.servers import NAME, ServerProcess

WRITE_JSON = ("structured", "tool", "agent", "json")  # tests with such a word in their name want JSON
NEVER_SAW_TOOLS = "with tool_choice='auto' the demo model, which was trained to answer questions, calls no tool"
CANNOT_COPY = "the demo model calls the function, but does not take its argument from the prompt"
NEVER_SAW_JSON = "the demo model does not do what a prompt asks for: where any JSON object is allowed it writes {}"


class TestChatOpenAI(ChatModelIntegrationTests):  # type: ignore[misc]
    """The server holds forced calls and answers of a schema to their form. That they end is up to the model: this one
    would go on until `max_tokens`, so in these tests a bias makes the tokens likely that close strings and brackets."""

    @pytest.fixture(autouse=True)
    def _connect(self, server: ServerProcess, request: pytest.FixtureRequest) -> None:
        self._params: dict[str, Any] = {"model": NAME, "base_url": server.base_url, "api_key": "none"}
        self._params |= {"temperature": 0, "stream_usage": True, "max_tokens": 32}
        if any(word in request.node.name for word in WRITE_JSON):
            bias = {str(token): 12 for sign in ('"', "]", "}") for token in server.tokenize(sign)}
            self._params |= {"logit_bias": bias, "max_tokens": 100}

    @property
    def chat_model_class(self) -> Any:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self._params

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        model = self.chat_model_class(**self.chat_model_params)
        passages = "\n\n".join(f"Tulmaris Works makes lenses of {number} sizes." for number in range(20))
        for _ in range(2):
            if not stream:
                answer: Any = model.invoke(passages)
            else:
                chunks: Any = list(model.stream(passages))
                answer = sum(chunks[1:], chunks[0])
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        return answer

    @pytest.mark.xfail(reason=NEVER_SAW_JSON, strict=True)
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(reason=CANNOT_COPY, strict=True)
    def test_tool_calling(self, model: BaseChatModel) -> None:
        super().test_tool_calling(model)

    @pytest.mark.xfail(reason=CANNOT_COPY, strict=True)
    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        await super().test_tool_calling_async(model)

    @pytest.mark.xfail(reason=CANNOT_COPY, strict=True)
    def test_unicode_tool_call_integration(self, model: BaseChatModel, *args: Any, **kwargs: Any) -> None:
        super().test_unicode_tool_call_integration(model, *args, **kwargs)

    @pytest.mark.xfail(reason=NEVER_SAW_TOOLS, strict=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)
