"""Benchmarks of block hashing and of the prefix index."""
