"""Measurements of this project. Run each from the project root: `python -m benchmarks.engine_cpu --help`."""
