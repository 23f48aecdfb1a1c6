"""Hooks of schemathesis: the requests that it makes ask for few tokens, and for the model that there is."""

from __future__ import annotations

from typing import Any

import schemathesis

from tests.integrations.servers import NAME

MAX_TOKENS = 4
LIMITS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
    "/v1/chunks": (),
}


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Change a request before it is sent. Only what would be allowed is changed, so that bad values stay bad."""
    body, fields = case.body, LIMITS.get(case.operation.path)
    if not isinstance(body, dict) or fields is None:
        return
    for field in fields:
        if isinstance(body.get(field), int) and body[field] > MAX_TOKENS:
            body[field] = MAX_TOKENS
    if fields and all(body.get(field) is None for field in fields):
        body[fields[0]] = MAX_TOKENS
    if isinstance(body.get("model"), str):
        body["model"] = NAME
    if case.operation.path == "/v1/chunks":
        _make_storable(body)


def _make_storable(body: dict[str, Any]) -> None:
    """Give a passage what the description cannot ask for, since few bodies come near it by chance."""
    if isinstance(body.get("text"), str):
        body["text"] += "a"
    for field in ("retention_seconds", "ttl"):
        if isinstance(body.get(field), str):
            body[field] = "5m"
    for field in ("token_ids", "prefix"):
        if isinstance(body.get(field), list):
            body[field] = [token % 256 if type(token) is int else token for token in body[field]]
