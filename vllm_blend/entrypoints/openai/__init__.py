"""The OpenAI-compatible server: a FastAPI application over `AsyncLLM`, one file for each endpoint.

`app.create_app` builds it, `vllm-blend serve` (`entrypoints/serve.py`) runs it. The extra `server` installs what it
needs.
"""
