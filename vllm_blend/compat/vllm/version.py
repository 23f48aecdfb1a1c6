"""The version of the vLLM whose API this is: callers branch on it. setup.py runs this file, so it imports nothing."""

__version__ = "0.22.1+blend"
__version_tuple__ = (0, 22, 1, "blend")
