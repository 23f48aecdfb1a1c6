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
from vllm_blend.prompt_parser import is_far_too_long, parse_piece

router = APIRouter(route_class=StrictRoute)

MAX_CONTEXTS = 16  # tokens of a text, as multiples of max_model_len


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Return the token ids of a text, or of a conversation."""
    server = server_of(request)
    server.check_model(body.model)
    ids = await server.in_tokenizing_thread(_tokenize, server, body)
    answer = TokenizeResponse(
        count=len(ids),
        max_model_len=server.engine.max_model_len,
        tokens=ids,
        token_strs=[*server.engine.get_tokenizer().convert_ids_to_tokens(ids)] if body.return_token_strs else None,
    )
    return Response(answer.to_json(), media_type="application/json")


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Return the text of token ids."""
    server = server_of(request)
    server.check_model(body.model)
    outside = next((token for token in body.tokens if not 0 <= token < server.engine.vocab_size), None)
    if outside is not None:
        raise bad_request(
            f"tokens holds {outside}, outside the vocabulary of {server.engine.vocab_size} tokens: remove it", "tokens"
        )
    text = await server.in_tokenizing_thread(server.engine.get_tokenizer().decode, body.tokens)
    return Response(DetokenizeResponse(prompt=str(text)).to_json(), media_type="application/json")


def _tokenize(server: Server, body: TokenizeRequest) -> list[int]:
    engine = server.engine
    if body.prompt is not None:
        if is_far_too_long([body.prompt], engine.get_tokenizer(), MAX_CONTEXTS // 2 * engine.max_model_len):
            raise bad_request(
                f"prompt has more than {MAX_CONTEXTS} times max_model_len={engine.max_model_len} tokens, and other "
                "requests wait while it is tokenized: send it in pieces",
                "prompt",
            )
        special = body.add_special_tokens is not False
        return parse_piece(body.prompt, engine.get_tokenizer(), special, "prompt", engine.vocab_size)
    template = make_template(
        server,
        body.chat_template,
        body.chat_template_kwargs,
        body.tools,
        body.add_generation_prompt,
        body.continue_final_message,
    )
    off = BlendOptions(mode="off")  # what is only tokenized has not been seen
    return parse_chat_prompt(server, template, parse_messages(body.messages), body.documents, off, None).token_ids
