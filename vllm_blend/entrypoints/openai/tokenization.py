"""POST /tokenize and /detokenize."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from vllm_blend.entrypoints.openai.errors import bad_request
from vllm_blend.entrypoints.openai.passages import BlendOptions
from vllm_blend.entrypoints.openai.prompts import make_template, parse_chat_prompt, parse_messages
from vllm_blend.entrypoints.openai.protocol.others import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm_blend.entrypoints.openai.server import Server, server_of
from vllm_blend.entrypoints.openai.strict_json import StrictRoute
from vllm_blend.entrypoints.openai.tool_calls.tool_choice import parse_tool_choice, parse_tools
from vllm_blend.prompt_parser import is_far_too_long
from vllm_blend.prompt_pieces import encode_start
from vllm_blend.prompt_pieces import tokenize as tokenize_text

router = APIRouter(route_class=StrictRoute)

MAX_CONTEXTS = 16  # tokens of a text, as multiples of max_model_len
MAX_DETOKENIZED = 1 << 17  # or max_model_len, if that is larger: decoding cannot be interrupted


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a text, or of a conversation."""
    server = server_of(request)
    server.check_model(body.model)
    answer = await server.in_tokenizing_thread(_write_tokens, server, body)
    return Response(answer, media_type="application/json")


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids."""
    server = server_of(request)
    server.check_model(body.model)
    limit = max(MAX_DETOKENIZED, server.engine.max_model_len)
    if len(body.tokens) > limit:
        raise bad_request(f"tokens has {len(body.tokens)} tokens: send at most {limit} at a time", "tokens")
    text = await server.in_tokenizing_thread(_detokenize, server, body.tokens)
    return Response(DetokenizeResponse(prompt=text).to_json(), media_type="application/json")


def _detokenize(server: Server, tokens: list[int]) -> str:
    vocab_size = server.engine.vocab_size
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < vocab_size:
            message = f"tokens holds {token}, outside the vocabulary of {vocab_size} tokens: remove it"
            raise bad_request(message, "tokens")
    return str(server.engine.get_tokenizer().decode(tokens))


def _write_tokens(server: Server, body: TokenizeRequest) -> str:
    ids = _tokenize(server, body)
    strings = [*server.engine.get_tokenizer().convert_ids_to_tokens(ids)] if body.return_token_strs else None
    max_model_len = server.engine.max_model_len
    return TokenizeResponse(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=strings).to_json()


def _tokenize(server: Server, body: TokenizeRequest) -> list[int]:
    engine = server.engine
    if body.prompt is not None:
        if is_far_too_long([body.prompt], engine.get_tokenizer(), MAX_CONTEXTS // 2 * engine.max_model_len):
            raise bad_request(
                f"prompt has more than {MAX_CONTEXTS} times max_model_len={engine.max_model_len} tokens, and other "
                "requests wait while it is tokenized: send it in pieces",
                "prompt",
            )
        begins = body.add_special_tokens is not False
        tokenizer = engine.get_tokenizer()
        return encode_start(tokenizer, body.prompt) if begins else tokenize_text(tokenizer, body.prompt).ids
    template = make_template(
        server,
        body.chat_template,
        body.chat_template_kwargs,
        parse_tool_choice(None, parse_tools(body.tools)).template_tools,
        body.add_generation_prompt,
        body.continue_final_message,
    )
    off = BlendOptions(mode="off")  # what is only tokenized has not been seen
    return parse_chat_prompt(server, template, parse_messages(body.messages), body.documents, off, None).token_ids
