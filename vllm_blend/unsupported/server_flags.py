"""The flags of `vllm serve` (0.11 to 0.22) beside those of the engine that `vllm-blend serve` does not have."""

from __future__ import annotations

_NO_LORA = "merge the LoRA adapter into the weights and serve the merged model"
_LOGS = "the log has one line for each request, without its text (--disable-access-log leaves it out)"
_PROXY = "put a proxy in front of the server"
_ONE_PROCESS = "the API server is one process: start several servers behind a proxy, see docs/operations.md"
_NO_PLUGINS = "the server loads no plugins"

# Name with underscores -> what to do instead.
UNSUPPORTED_SERVER_FLAGS: dict[str, str] = {
    "lora_modules": _NO_LORA,
    "prompt_adapters": "the engine has no prompt adapters",
    "enable_log_requests": _LOGS,
    "disable_log_requests": _LOGS,
    "enable_log_outputs": _LOGS,
    "enable_log_deltas": _LOGS,
    "max_log_len": _LOGS,
    "disable_uvicorn_access_log": "give --disable-access-log",
    "disable_access_log_for_endpoints": "give --disable-access-log, which leaves out all endpoints",
    "log_config_file": "give --log-format and --uvicorn-log-level",
    "api_server_count": _ONE_PROCESS,
    "headless": _ONE_PROCESS,
    "disable_frontend_multiprocessing": "the engine always runs in a process of its own",
    "middleware": f"the server loads no middleware: {_PROXY}",
    "allow_credentials": "the server answers CORS without credentials: send the key as a header",
    "allowed_methods": "give --allowed-origins: it allows the methods of all endpoints",
    "allowed_headers": "give --allowed-origins: it allows the headers that clients send",
    "ssl_ca_certs": f"the server asks clients for no certificate: {_PROXY}",
    "ssl_cert_reqs": f"the server asks clients for no certificate: {_PROXY}",
    "ssl_ciphers": f"the ciphers are those of Python's ssl module: {_PROXY}",
    "enable_ssl_refresh": "certificates are read again on SIGHUP: send it when they have changed",
    "enable_prompt_tokens_details": "usage always has prompt_tokens_details: leave it out",
    "enable_force_include_usage": "clients ask for it with stream_options={'include_usage': true}",
    "enable_request_id_headers": "answers always have an X-Request-Id: leave it out",
    "enable_server_load_tracking": "/status and /metrics count the requests that run and wait: leave it out",
    "enable_tokenizer_info_endpoint": "there is no such endpoint",
    "enable_offline_docs": "/docs needs the network: read /openapi.json",
    "h11_max_incomplete_event_size": "the size of requests is limited by --max-body-size",
    "tool_parser_plugin": _NO_PLUGINS,
    "tool_server": "the server runs no tools: it returns the calls to the client",
    "exclude_tools_when_tool_choice_none": "tool_choice 'none' always leaves tools out of the prompt: leave it out",
    "log_error_stack": "errors of the server are always logged with their stack: leave it out",
}
