"""What hostile clients send in `benchmarks.bad_bodies`: bodies near or beyond the server's limits, and floods."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import urlsplit

import aiohttp

COMPLETIONS, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
TEXT_BYTES = 8_000_000  # a little below `--max-body-size`
VALUES = 1_000_000  # a little below what JSON may have besides its text
PARTS = 40_000  # objects of two keys each, a little below what JSON may have of objects and keys
FLOOD = 2_000  # connections or requests of a flood
STEP = "a prefill of a whole step"
SECONDS = 60.0  # after which a client gives up
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True)
class Sent:
    """A request."""

    path: str
    body: bytes
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON))


Attack = Callable[[str], Awaitable[list[int]]]  # sends to a URL, and returns the statuses of the answers


def posts(*sent: Sent) -> Attack:
    """Return an attack that sends requests at once."""

    async def attack(url: str) -> list[int]:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=SECONDS)
        async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as client:

            async def send(one: Sent) -> int:
                try:
                    async with client.request(one.method, one.path, data=one.body, headers=one.headers) as response:
                        await response.read()
                        return response.status
                except (
                    aiohttp.ClientError,
                    TimeoutError,
                ):  # refused in the middle of the body, or not answered in time
                    return 0

            return list(await asyncio.gather(*map(send, sent)))

    return attack


def post(path: str, body: Any, times: int = 1, **fields: Any) -> Attack:
    encoded = body if isinstance(body, bytes) else json.dumps(body | fields).encode()
    return posts(*[Sent(path, encoded)] * times)


def raw(data: bytes, connections: int = 1, seconds: float = 2.0, leaves: bool = False) -> Attack:
    """Return an attack that writes bytes to connections, and reads what comes until they are closed or the time is up.
    With `leaves`, it closes them as soon as something has come."""

    async def one(host: str, port: int) -> list[int]:
        try:
            reader, writer = await asyncio.open_connection(host, port, limit=1 << 24)
        except OSError:
            return [0]
        found = b""
        try:
            writer.write(data)
            async with asyncio.timeout(seconds):
                await writer.drain()
                while piece := await reader.read(1 << 16):
                    found += piece
                    if leaves:
                        break
        except (TimeoutError, OSError):
            pass
        writer.close()
        starts = [at for at in range(len(found)) if found.startswith(b"HTTP/1.1 ", at)] if len(found) < 1 << 16 else [0]
        return [int(found[at + 9 : at + 12]) for at in starts if found[at + 9 : at + 12].isdigit()] or [0]

    async def attack(url: str) -> list[int]:
        at = urlsplit(url)
        found = await asyncio.gather(*(one(at.hostname or "", at.port or 80) for _ in range(connections)))
        return [status for each in found for status in each]

    return attack


def http(method: str, path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: x", *headers]
    lines += [f"Content-Length: {len(body)}"] if body else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def in_chunks(path: str, body: bytes, size: int) -> bytes:
    """Return a request whose body is sent in chunks of this many bytes."""
    head = http("POST", path, b"", "Content-Type: application/json", "Transfer-Encoding: chunked")
    pieces = (body[start : start + size] for start in range(0, len(body), size))
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def deep(levels: int, key: str) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {key: schema}}
    return schema


def cases(context: int, step_tokens: int, vocabulary: int, rng: Random) -> dict[str, Callable[[], Attack]]:
    """Return what makes each attack. `context` and `step_tokens` are the server's max_model_len and
    max_num_batched_tokens."""
    user = {"role": "user", "content": "a"}
    chat: dict[str, Any] = {"messages": [user], "max_tokens": 1}
    text: dict[str, Any] = {"prompt": "a", "max_tokens": 1}
    part = {"type": "text", "text": "a"}
    stops = [f"{i:>15}" for i in range(1000)]
    integers = [7] * (VALUES - 10)
    many = {"prompt": "a", "n": 256, "max_tokens": 64, "ignore_eos": True}
    long = {"prompt": "a", "max_tokens": context - 64, "ignore_eos": True, "stream": True}

    def whole_step() -> Attack:
        """Send prompts that no cache knows, as many as a step takes."""
        tokens = min(context - 1, step_tokens)
        asked = ([rng.randrange(10, vocabulary) for _ in range(tokens)] for _ in range(max(1, step_tokens // tokens)))
        return posts(*(Sent(COMPLETIONS, json.dumps({"prompt": ids, "max_tokens": 1}).encode()) for ids in asked))

    def function(index: int, parameters: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": f"f{index}", "parameters": parameters}}

    def form(**fields: Any) -> Attack:
        return post(COMPLETIONS, text, structured_outputs=fields)

    def forms(make: Callable[[int], Any], count: int) -> Attack:
        bodies = (text | {"structured_outputs": make(index)} for index in range(count))
        return posts(*(Sent(COMPLETIONS, json.dumps(body).encode()) for body in bodies))

    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}] * 10_000
    gaps = {
        "nothing": posts,
        STEP: whole_step,
        # The first ten: bodies that are wrong in themselves.
        "8 MB that are no JSON": lambda: post(CHAT, b'{"messages": "' + b"a" * TEXT_BYTES),
        "8 MB of invalid UTF-8": lambda: post(CHAT, b'{"messages": "' + b"\xff" * TEXT_BYTES + b'"}'),
        "10 MB, above the limit": lambda: post(CHAT, {"messages": "a" * 10_000_000}),
        "an unknown model": lambda: post(CHAT, chat, model="b"),
        "temperature NaN": lambda: post(CHAT, b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}'),
        "lists 100,000 deep": lambda: post(CHAT, b"[" * 100_000 + b"]" * 100_000),
        "a number of 8 million digits": lambda: post(CHAT, b'{"messages": [], "seed": ' + b"9" * TEXT_BYTES + b"}"),
        "8 MB of escapes": lambda: post(COMPLETIONS, b'{"prompt": "' + b"\\u00e9" * (TEXT_BYTES // 6) + b'"}'),
        "8 MB of halves of surrogates": lambda: post(COMPLETIONS, b'{"p": "' + b"\\ud800" * (TEXT_BYTES // 6) + b'"}'),
        "8 MB of white space": lambda: post(COMPLETIONS, b" " * TEXT_BYTES + b'{"prompt": "a", "max_tokens": 1}'),
        # Long texts.
        "an 8 MB string as prompt": lambda: post(COMPLETIONS, {"prompt": "a " * (TEXT_BYTES // 2)}),
        "an 8 MB string as message": lambda: post(
            CHAT, {"messages": [{"role": "user", "content": "a " * (TEXT_BYTES // 2)}]}
        ),
        "8 MB of one word": lambda: post(COMPLETIONS, {"prompt": "a" * TEXT_BYTES}),
        "100 prompts of one word of 16 KB": lambda: post(COMPLETIONS, {"prompt": ["ab" * 8192] * 100}),
        "8 MB of blank lines": lambda: post(CHAT, {"messages": [{"role": "user", "content": "a\n\n" * 2_600_000}]}),
        "8 MB of <source>": lambda: post(CHAT, {"messages": [{"role": "user", "content": "<source>" * 1_000_000}]}),
        "8 MB of combining characters": lambda: post(COMPLETIONS, {"prompt": "a" + "\u0301" * (TEXT_BYTES // 6)}),
        "8 MB of control tokens in a document": lambda: post(CHAT, chat, documents=["<|bos|>" * (TEXT_BYTES // 7)]),
        "8 MB of control tokens in a chunk": lambda: post(
            COMPLETIONS, text, prompt={"prefix": "a", "chunks": ["<|bos|>" * (TEXT_BYTES // 7)], "suffix": "?"}
        ),
        "8 MB to /tokenize": lambda: post("/tokenize", {"prompt": "a " * (TEXT_BYTES // 2)}),
        "16 contexts to /tokenize": lambda: post("/tokenize", {"prompt": "a " * (7 * context)}, return_token_strs=True),
        "131,072 tokens to /detokenize": lambda: post("/detokenize", {"tokens": [7] * 131_072}),
        "8 MB to /v1/chunks": lambda: post("/v1/chunks", {"text": "a " * (TEXT_BYTES // 2)}),
        "an 8 MB image": lambda: post(
            CHAT,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:," + "A" * TEXT_BYTES}}],
                    }
                ]
            },
        ),
        # Many values.
        "a million token ids": lambda: post(COMPLETIONS, {"prompt": integers}),
        "a million wrong messages": lambda: post(CHAT, {"messages": integers}),
        "a million unknown values": lambda: post(CHAT, chat, unknown=integers),
        "130,000 empty objects": lambda: post(CHAT, chat, documents=[{}] * 130_000),
        "40,000 parts of a message": lambda: post(CHAT, {"messages": [{"role": "user", "content": [part] * PARTS}]}),
        "40,000 messages": lambda: post(CHAT, {"messages": [user] * PARTS}),
        "1,000 messages of one part": lambda: post(CHAT, {"messages": [{"role": "user", "content": [part]}] * 1000}),
        "10,000 tool calls": lambda: post(
            CHAT, {"messages": [user, {"role": "assistant", "content": None, "tool_calls": calls}]}
        ),
        "40,000 blocks to /v1/messages": lambda: post(
            MESSAGES, {"max_tokens": 1, "messages": [{"role": "user", "content": [part] * PARTS}]}
        ),
        "40,000 items to /v1/responses": lambda: post(RESPONSES, {"input": [user] * PARTS}),
        "10,000 chunks": lambda: post(
            COMPLETIONS, text, prompt={"prefix": "a", "chunks": ["a b"] * 10_000, "suffix": "?"}
        ),
        "1,000 prompts of chunks": lambda: post(
            COMPLETIONS, text, prompt=[{"prefix": "a", "chunks": ["a b"] * 20, "suffix": "?"}] * 1000
        ),
        "a document of 130,000 keys": lambda: post(
            CHAT, chat, documents=[{"text": "a", **{f"tit{i}": 1 for i in range(130_000)}}]
        ),
        "100 documents of 1,000 keys": lambda: post(
            CHAT, chat, documents=[{"text": "a", **{f"tit{i}": 1 for i in range(1000)}}] * 100
        ),
        "a tool of 100,000 keys": lambda: post(
            CHAT, chat, tools=[function(0, {"type": "object", **{f"k{i}": 1 for i in range(100_000)}})]
        ),
        "metadata of 100,000 keys": lambda: post(
            RESPONSES, {"input": "a", "max_output_tokens": 1, "metadata": {f"k{i}": "1" for i in range(100_000)}}
        ),
        "variables of the template 800 deep": lambda: post(
            CHAT, chat, chat_template_kwargs={"a": json.loads("[" * 800 + "]" * 800)}
        ),
        # What each token is compared with.
        "256 completions": lambda: post(COMPLETIONS, many),
        "252,000 log-probabilities asked for": lambda: post(
            COMPLETIONS, {"prompt": [[7 + i] * 1000 for i in range(12)], "max_tokens": 1, "echo": True, "logprobs": 20}
        ),
        "1,000 stop strings for 256 completions": lambda: post(COMPLETIONS, many, stop=stops),
        "1,000 bad words for 256 completions": lambda: post(COMPLETIONS, many, bad_words=stops),
        "logit_bias of the vocabulary for 100 completions": lambda: post(
            COMPLETIONS, many, n=100, logit_bias={str(i): 1.0 for i in range(vocabulary)}
        ),
        "allowed_token_ids of the vocabulary for 100 completions": lambda: post(
            COMPLETIONS, many, n=100, allowed_token_ids=list(range(vocabulary))
        ),
        "1,024 completions": lambda: post(COMPLETIONS, many, n=1024, max_tokens=8),
        "20 log-probabilities for 256 completions": lambda: post(COMPLETIONS, many, n=256, logprobs=20),
        # Forms of answers.
        "a choice of 100,000": lambda: form(choice=[f"{i:06}" for i in range(100_000)]),
        "a schema of 30,000 properties": lambda: form(
            json={"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(30_000)}}
        ),
        "a schema 60 deep": lambda: form(json=deep(60, "a")),
        "a schema 20,000 deep": lambda: post(
            COMPLETIONS,
            b'{"prompt": "a", "structured_outputs": {"json": ' + b'{"items": ' * 20_000 + b"{}" + b"}" * 20_000 + b"}}",
        ),
        "a regular expression of 8 MB": lambda: form(regex="a" * TEXT_BYTES),
        "5 regular expressions that take 10 s": lambda: forms(lambda i: {"regex": f"(a{{1000}}){{{1000 + i}}}"}, 5),
        "a grammar of 8 MB": lambda: form(grammar="root ::= " + '"a" | ' * (TEXT_BYTES // 6) + '"a"'),
        "200 new schemas": lambda: forms(lambda i: {"json": deep(8, f"k{i}")}, 200),
        "1,024 tools, one required": lambda: post(
            CHAT, chat, tools=[function(i, deep(8, "a")) for i in range(1024)], tool_choice="required"
        ),
        "10,000 structural tags": lambda: form(
            structural_tag={
                "structures": [{"begin": f"<{i}>", "schema": {}, "end": "</>"} for i in range(10_000)],
                "triggers": [f"<{i}>" for i in range(10_000)],
            }
        ),
        # Floods, and HTTP.
        "32 bodies of 8 MB": lambda: post(COMPLETIONS, {"prompt": "a " * (TEXT_BYTES // 2)}, 32),
        "500 bodies of 64 KB that are no JSON": lambda: post(CHAT, b'{"a": ' + b" " * 65_000, 500),
        "8 MB in chunks of 8 bytes": lambda: raw(
            in_chunks(COMPLETIONS, json.dumps({"prompt": "a " * 4_000_000}).encode(), 8), seconds=60
        ),
        "8 MB, compressed by gzip": lambda: posts(
            Sent(CHAT, gzip.compress(b"a" * TEXT_BYTES), headers=JSON | {"Content-Encoding": "gzip"})
        ),
        "8 MB of audio, multipart": lambda: posts(
            Sent(
                "/v1/audio/transcriptions",
                b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
                + b"a" * TEXT_BYTES
                + b"\r\n--x--\r\n",
                headers={"Content-Type": "multipart/form-data; boundary=x"},
            )
        ),
        "2,000 requests in one packet": lambda: raw(http("GET", "/version") * FLOOD, seconds=20),
        "500 chats in one packet": lambda: raw(
            http("POST", CHAT, json.dumps(chat).encode(), "Content-Type: application/json") * 500, seconds=30
        ),
        "2,000 slow headers": lambda: raw(b"GET / HTTP/1.1\r\nX-A: ", FLOOD),
        "2,000 WebSockets": lambda: raw(
            http(
                "GET",
                "/v1/realtime",
                b"",
                "Upgrade: websocket",
                "Connection: Upgrade",
                "Sec-WebSocket-Version: 13",
                "Sec-WebSocket-Key: MTIzNDU2Nzg5MDEyMzQ1Ng==",
            ),
            FLOOD,
        ),
        "2,000 HEAD": lambda: posts(*[Sent("/v1/models", b"", "HEAD", {})] * FLOOD),
        "2,000 OPTIONS": lambda: posts(*[Sent(CHAT, b"", "OPTIONS", {})] * FLOOD),
        "2,000 unknown paths of 60 KB": lambda: posts(*[Sent("/" + "a" * 60_000, b"", "GET", {})] * FLOOD),
        "1,000 requests of 250 headers": lambda: posts(
            *[Sent("/version", b"", "GET", {f"x-{i}": "a" * 200 for i in range(250)})] * 1000
        ),
        "2,000 streams that are left at once": lambda: raw(
            http("POST", COMPLETIONS, json.dumps(long).encode(), "Content-Type: application/json", "Connection: close"),
            FLOOD,
            leaves=True,
            seconds=30,
        ),
    }
    return gaps


def statuses_of(found: Sequence[int]) -> list[int]:
    return sorted(set(found))
