"""What this project measures. Run each from the project root: `python -m benchmarks.engine_cpu --help`."""
