"""Events about the prefix cache, as vLLM publishes them: routers send a request to the engine that has its prefix."""
