"""Watching a server: /metrics for Prometheus, a status page at / and what it reads at /status.

    server.metrics = ServerMetrics(engine, model_name, shows_passages=not has_tenants)   # one for each application
    app.include_router(endpoints.router)                                                # reads app.state.server.metrics

    with server.metrics.request(prompt, sampling_params, arrival_time) as record:       # in the one place that runs
        async for output in engine.generate(prompt, sampling_params, ...):              # requests
            record.on_output(output)

Times are those of the engine's clock as `RequestOutput.metrics` has them, so what a stream's reader takes does not
count. Everything here runs in the event loop's thread.
"""

from __future__ import annotations

from vllm_blend.entrypoints.openai.metrics.recorder import Recorder, RequestRecord
from vllm_blend.entrypoints.openai.metrics.server_metrics import ServerMetrics

__all__ = ["Recorder", "RequestRecord", "ServerMetrics"]
