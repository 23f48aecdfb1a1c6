"""What the kinds of errors, the tiers and the places where tokens are found mean, in words for the status page."""

from __future__ import annotations

FAILURES = {
    "bad_input": "The engine found that the prompt or its settings cannot work together.",
    "queue_full": "As many requests as may were waiting (--max-queued-requests).",
    "engine_down": "The engine process had ended, hung or was loading, or the server was stopping.",
    "deadline": "It took longer than --request-timeout allows.",
    "failed": "An error of this program or of the machine: the log has it.",
}
ENDS = {
    "error": "The engine failed in the middle of the answer: the log has it.",
    "abort": "The client left before its answer was complete, or the server stopped.",
}
REFUSALS = {
    400: "The request says something that is wrong or contradicts itself.",
    401: "There was no API key, or a wrong one.",
    404: "There is no such path, model or stored passage.",
    405: "The path does not take this method.",
    408: "The headers or the body took too long (--header-timeout, --body-timeout).",
    413: "The body or the prompt was too large (--max-body-size).",
    414: "The URL was too long (--max-header-size).",
    415: "The body was not JSON.",
    429: "The queue was full, or a tenant was at its limit.",
    431: "The headers were too large or too many (--max-header-size, --max-header-count).",
    500: "An error of this program: the log has it.",
    503: "The engine was down, the server was stopping, or there were too many connections.",
}
OTHER_REFUSAL = "Another status of HTTP."
TIERS = {
    "memory": "Passages in this process, ready to use (--blend-chunk-cache-gib); what is worth least leaves first.",
    "disk": "Stored passages that outlive a restart (--chunk-store-path). What is read comes back to the memory.",
    "remote": "Stored passages that several machines share (--chunk-store-url), asked for last.",
}
FOUND_IN = {
    "prefix_cache": "Pages of a prompt with the same beginning.",
    "retained": "Pages of a context that was blended before, as a whole.",
    "device": "Passages in memory, on the engine's device.",
    "host": "Passages in memory, on the host.",
    "disk": "Passages on the disk.",
    "remote": "Passages on the store's server.",
    "joined": "Passages that another prompt was having computed when this one came.",
    "old_kvs": "KV that was handed over by the hooks.",
}
