"""The worker process: one engine (or data-parallel rank) behind its subjects."""
