"""The engine on Ray: an application for Ray Serve whose requests go where their passages are, and batch inference."""

from vllm_blend.ray.app import build_app
from vllm_blend.ray.batch import generate

__all__ = ["build_app", "generate"]
