"""Benchmarks on GPUs, run by `python -m tests.bench.gpu.<name>`."""
