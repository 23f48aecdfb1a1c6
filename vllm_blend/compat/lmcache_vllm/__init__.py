"""The import name of LMCache's vLLM integration. It has no contents yet."""
