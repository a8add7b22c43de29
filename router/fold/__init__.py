"""The router's state as a fold of the log: workers, load, expected blocks, prefill times."""
