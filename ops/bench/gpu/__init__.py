"""Benchmarks on GPUs, run by `python -m headwater.ops.bench.gpu.<name>`."""
