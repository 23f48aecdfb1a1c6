"""The parts of `python -m benchmarks.side_by_side`: its rows, their floors, the processes that run them, the report."""
