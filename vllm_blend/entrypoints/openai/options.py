"""The options of the server, as flags of `vllm-blend serve`. Names that vLLM has are vLLM's."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from vllm_blend.checks import not_negative, positive, require
from vllm_blend.engine.timeouts import Timeouts
from vllm_blend.options import OptionGroup, option

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)


def _check_port(name: str, value: int) -> None:
    require(0 <= value <= 65535, f"{name}={value} is no TCP port: use 1 to 65535, or 0 for any free one")


def _check_origins(name: str, value: list[str] | None) -> None:
    wrong = next((origin for origin in value or () if origin != "*" and not _ORIGIN.fullmatch(origin)), None)
    require(
        wrong is None,
        f"{name} holds {wrong!r}, which is no origin: write a scheme and a host, such as https://example.org, or *",
    )


def _check_path(name: str, value: str) -> None:
    require(value == "" or value.startswith("/"), f"{name}={value!r} does not begin with /: write /{value}")


@dataclass(frozen=True)
class ServerOptions(OptionGroup):
    """How the server is reached, who may use it, and how much it takes on."""

    title: ClassVar[str] = "Server"

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for every interface")
    port: int = option(8000, "TCP port; 0 for any free one", check=_check_port)
    uds: str | None = option(None, "Unix domain socket to listen on, instead of host and port")
    served_model_name: list[str] | None = option(
        None, "names that requests may use for the model; the first is the one in answers (default: the model's path)"
    )
    api_key: list[str] | None = option(None, "keys of which a request must bring one; each is a tenant", shown=False)
    api_keys: str | None = option(None, "file with a key, or a tenant's name and a key, on every line")
    max_queued_requests: int = option(
        1024, "completions that may wait for the engine beside those that run; others get 429", check=positive
    )
    request_timeout: float | None = option(None, "seconds after which a request is aborted", check=positive)
    max_body_size: int = option(8 << 20, "bytes of the largest request; larger ones get 413", check=positive)
    body_timeout: float = option(
        120.0, "seconds that a client may take to send a request's body; then it gets 408", check=positive
    )
    max_header_size: int = option(
        64 << 10, "bytes of a request's URL and headers; larger ones get 414 or 431", check=positive
    )
    max_header_count: int = option(256, "headers of a request; more get 431", check=positive)
    header_timeout: float = option(
        20.0, "seconds that a new connection may be silent, or take for a request's headers", check=positive
    )
    write_timeout: float = option(
        120.0, "seconds in which a client must read 16 KiB of an answer that waits; then it is cut off", check=positive
    )
    timeout_keep_alive: int = option(
        5, "seconds that a connection is kept after an answer, for the client's next request", check=positive
    )
    max_connections: int = option(4096, "connections at a time; more get 503 and are closed", check=positive)
    max_prompts: int = option(1024, "the most completions (prompts times n) that one request may have", check=positive)
    heartbeat_timeout: float = option(
        Timeouts.heartbeat,
        "seconds without a sign of life after which the engine counts as down",
        check=positive,
    )
    step_timeout: float = option(
        Timeouts.step, "seconds that a step of the engine may take before the engine counts as down", check=positive
    )
    shutdown_timeout: float = option(
        30.0, "seconds that running requests have to finish after SIGTERM", check=not_negative
    )
    chat_template: str | None = option(None, "file with a chat template, or its text, instead of the tokenizer's")
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto", "whether the template reads a message's content as a string or as a list of parts"
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None, "variables of the chat template for requests that do not set them, as JSON"
    )
    trust_request_chat_template: bool = option(False, "let requests bring a chat template of their own")
    response_role: str = option("assistant", "the role of answers to chats")
    enable_auto_tool_choice: bool = option(True, "let the model decide whether to call a tool")
    tool_call_parser: str | None = option(
        None, "how the model writes tool calls: hermes, llama3_json or mistral (default: as its chat template shows)"
    )
    reasoning_parser: str | None = option(
        None, "how the model writes its reasoning: qwen3 or deepseek_r1 (default: as its chat template shows)"
    )
    return_tokens_as_token_ids: bool = option(False, "write tokens in log-probabilities as token_id:N")
    require_verdict: bool = option(
        False, "do not blend without a verdict of check-model that lets the server's rule, ratio and company pass"
    )
    detect_chunks: bool = option(True, "find passages that were seen before in plain strings")
    tenant_metrics: bool = option(
        False, "show tenants by name, and what each has used, in /metrics and on the status page, which need no key"
    )
    root_path: str = option(
        "", "path under which a proxy serves this server, whether it keeps that path or not", check=_check_path
    )
    allowed_origins: list[str] | None = option(
        None, "origins of web pages that may call the server (CORS), or * for any", check=_check_origins
    )
    ssl_keyfile: str | None = option(None, "file with the key of the TLS certificate")
    ssl_certfile: str | None = option(None, "file with the TLS certificate")
    disable_fastapi_docs: bool = option(False, "serve no /docs, /redoc and /openapi.json")
    uvicorn_log_level: Literal["debug", "info", "warning", "error", "critical", "trace"] = option(
        "info", "least severe messages of uvicorn that are shown"
    )
    log_format: Literal["text", "json"] = option("text", "one line for each request: text, or a JSON object")
    disable_access_log: bool = option(False, "log no line for each request")
    otlp_traces_endpoint: str | None = option(
        None, "URL that OpenTelemetry's spans are sent to, by OTLP over HTTP: http://localhost:4318/v1/traces"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            (self.ssl_keyfile is None) == (self.ssl_certfile is None),
            "ssl_keyfile and ssl_certfile belong together: give both, or neither",
        )
        names = self.served_model_name
        require(names is None or all(names), f"served_model_name={names} holds an empty name: remove it")
