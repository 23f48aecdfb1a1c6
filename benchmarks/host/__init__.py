"""The parts of `python -m benchmarks.host_time`: the device's stand-in, the process that measures, the table."""
