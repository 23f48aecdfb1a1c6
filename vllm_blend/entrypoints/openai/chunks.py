"""/v1/chunks: passages that are stored ahead of any question, by tenant.

KV depends on what stands before a passage when it is computed. A passage is stored as it stands in the prompts that
will have it: as one of the `documents` of a conversation that begins with `messages` (none: without a system prompt),
or as one of the `chunks` of a completion behind `prefix`. In other prompts it is known all the same, and computed again
when it is used for the first time.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response

from vllm_blend.chunks.messages import parse_seconds
from vllm_blend.engine.request_table import counted, is_full
from vllm_blend.entrypoints.openai.errors import APIError, bad_request
from vllm_blend.entrypoints.openai.passages import BlendOptions, Document, PassageFinder, chat_prompt, completion_prompt
from vllm_blend.entrypoints.openai.passages.stored import (
    DEFAULT_PRIORITY,
    DEFAULT_SECONDS,
    StoredPassage,
    UnknownPassageError,
    passage_id,
)
from vllm_blend.entrypoints.openai.prompts import make_template, parse_messages
from vllm_blend.entrypoints.openai.protocol.chunks import (
    ChunkDeleted,
    ChunkList,
    ChunkObject,
    ChunkRequest,
    ChunkUpdate,
    RetentionFields,
)
from vllm_blend.entrypoints.openai.server import Server, server_of, tenant_of
from vllm_blend.entrypoints.openai.strict_json import StrictRoute
from vllm_blend.entrypoints.openai.tenancy import CURRENT
from vllm_blend.inputs import ParsedPrompt

router = APIRouter(route_class=StrictRoute)

MAX_ENCODING = 32  # passages of all clients that are encoded at a time
Salt = Annotated[str | None, Header(alias="X-Cache-Salt", description="the cache_salt that it was stored with")]


@router.post("/v1/chunks", response_model=ChunkObject)
async def store_chunk(body: ChunkRequest, request: Request, x_cache_salt: Salt = None) -> Response:
    """Compute a passage's KV and keep it; the same passage again is kept anew, under the same id."""
    cache_salt = x_cache_salt if body.cache_salt is None else body.cache_salt
    server, salt = server_of(request), tenant_of(request).combined_salt(cache_salt)
    server.check_model(body.model)
    if not server.engine.config.blend.enable_blending:
        raise bad_request("this server does not blend, so no passage would be used: start it with --enable-blending")
    seconds = _seconds(body) or DEFAULT_SECONDS
    priority = DEFAULT_PRIORITY if body.priority is None else body.priority
    server.stored.check_space(len(body.text or "") + len(body.title or ""), salt)
    parsed = await server.prepare(_prompt_with, server, body, salt)
    if not parsed.chunk_bounds:
        raise bad_request(
            "text: the chat template changes the passage, or merges it with what stands beside it, so that it is no "
            "chunk: give a prefix, and use the passage in /v1/completions",
            "text",
        )
    keys = await _encode(server, parsed)
    await server.engine.call("retain_chunks", keys, priority, seconds, tenant_of(request).name)
    now = server.stored.now()
    passage = StoredPassage(
        passage_id(salt, body.text, body.token_ids, body.title, body.prefix, body.messages),
        salt,
        body.text,
        body.title,
        sum(stop - start for start, stop in parsed.chunk_bounds),
        tuple(keys),
        now,
        now + seconds,
        priority,
        dict(body.metadata or {}),
    )
    return _answer(_shown(server.stored.add(passage)))


@router.get("/v1/chunks", response_model=ChunkList)
async def list_chunks(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    after: Annotated[str | None, Query(max_length=200)] = None,
    x_cache_salt: Salt = None,
) -> Response:
    """List the passages of this API key, in the order in which they were stored."""
    server, salt = server_of(request), tenant_of(request).combined_salt(x_cache_salt)
    try:
        passages, has_more = server.stored.page(salt, limit, after)
    except UnknownPassageError as error:
        raise _not_found(error, "after") from error
    shown = [_shown(passage) for passage in passages]
    ends = (shown[0].id, shown[-1].id) if shown else (None, None)
    return _answer(ChunkList(object="list", data=shown, first_id=ends[0], last_id=ends[1], has_more=has_more))


@router.get("/v1/chunks/{chunk_id}", response_model=ChunkObject)
async def get_chunk(chunk_id: str, request: Request, x_cache_salt: Salt = None) -> Response:
    """Describe a stored passage."""
    return _answer(_shown(_find(request, chunk_id, x_cache_salt)))


@router.patch("/v1/chunks/{chunk_id}", response_model=ChunkObject)
async def update_chunk(chunk_id: str, body: ChunkUpdate, request: Request, x_cache_salt: Salt = None) -> Response:
    """Keep a stored passage for so many seconds from now, or with another priority."""
    server, passage = server_of(request), _find(request, chunk_id, x_cache_salt)
    server.stored.keep(passage, _seconds(body), body.priority)
    if body.metadata is not None:
        passage.metadata = dict(body.metadata)
    left = passage.expires - server.stored.now()
    await server.engine.call("retain_chunks", list(passage.keys), passage.priority, left, tenant_of(request).name)
    return _answer(_shown(passage))


@router.delete("/v1/chunks/{chunk_id}", response_model=ChunkDeleted)
async def delete_chunk(chunk_id: str, request: Request, x_cache_salt: Salt = None) -> Response:
    """Forget a passage, and remove its KV from every tier. Requests that run keep what they have."""
    server, passage = server_of(request), _find(request, chunk_id, x_cache_salt)
    server.stored.delete(passage.id, passage.salt)
    await server.engine.call("retain_chunks", list(passage.keys), 0, 0.0, "")
    await server.engine.call("remove_chunks", list(passage.keys))
    return _answer(ChunkDeleted(id=passage.id, object="chunk", deleted=True))


def _prompt_with(server: Server, body: ChunkRequest, salt: str | None) -> ParsedPrompt:
    """Return a prompt that has the passage as its only chunk. Raises ValueError or TypeError."""
    engine, finder = server.engine, PassageFinder(detects=False)
    tokenizer, limits = (
        engine.get_tokenizer(),
        (engine.vocab_size, engine.max_model_len, True, engine.config.model.trusted_chunks),
    )
    has_template = server.chat_template is not None or tokenizer.chat_template is not None
    if body.token_ids is not None or body.prefix is not None or (body.messages is None and not has_template):
        chunk = body.token_ids if body.text is None else body.text
        given = {"prefix": body.prefix or "", "chunks": [chunk], "suffix": "?"}
        return completion_prompt(finder, given, BlendOptions(), salt, tokenizer, *limits)
    assert body.text is not None
    if not body.text.strip():
        raise ValueError("text is empty: give the passage")
    template = make_template(server, None, None, None, None, None)
    messages = parse_messages([*(body.messages or []), {"role": "user", "content": "?"}])
    text, title = body.text.strip(), (body.title or "").strip() or None
    fields = {"title": title, "text": text} if title else {"text": text}
    document = Document(text, title, fields)
    return chat_prompt(finder, template, messages, [document], BlendOptions(), salt, *limits)


async def _encode(server: Server, parsed: ParsedPrompt) -> list[str]:
    """Have the chunks of a prompt computed and stored. Return the keys of their KV. Raises APIError (429)."""
    tenant = CURRENT.get()
    if is_full(server.num_encoding, tenant.name, 1, MAX_ENCODING):
        raise APIError(
            429,
            f"{MAX_ENCODING} passages are being stored: try again in a second",
            code="queue_full",
            headers={"Retry-After": "1"},
        )
    with counted(server.num_encoding, tenant.name):
        tenant.usage.count(tenant.limits, len(parsed.token_ids))
        chunks = await server.engine.call("encode_chunks", parsed, tenant.owner)
    return [chunk["key"] for chunk in chunks]


def _find(request: Request, chunk_id: str, cache_salt: str | None) -> StoredPassage:
    """Return a passage of the client that asks. Raises APIError (404)."""
    try:
        return server_of(request).stored.get(chunk_id, tenant_of(request).combined_salt(cache_salt))
    except UnknownPassageError as error:
        raise _not_found(error, "chunk_id") from error


def _not_found(error: UnknownPassageError, param: str) -> APIError:
    return APIError(404, str(error), param=param, code="chunk_not_found")


def _seconds(body: RetentionFields) -> float | None:
    """Return for how long a passage is to be kept; None if the request does not say. Raises ValueError or TypeError."""
    name = "ttl" if body.retention_seconds is None else "retention_seconds"
    value = getattr(body, name)
    return None if value is None else parse_seconds(value, name)


def _shown(passage: StoredPassage) -> ChunkObject:
    return ChunkObject(
        id=passage.id,
        object="chunk",
        created_at=int(passage.created),
        expires_at=int(passage.expires),
        num_tokens=passage.num_tokens,
        priority=passage.priority,
        title=passage.title,
        text=passage.text,
        metadata=passage.metadata,
    )


def _answer(body: ChunkObject | ChunkList | ChunkDeleted) -> Response:
    return Response(body.to_json(), media_type="application/json")
