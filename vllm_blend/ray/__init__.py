"""The engine on Ray: an application for Ray Serve whose requests go where their passages are."""

from vllm_blend.ray.app import build_app

__all__ = ["build_app"]
