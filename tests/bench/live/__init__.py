"""Benchmarks of whole fleets of `headwater up`, with real engines or simulated ones."""
