"""Requests of a worker: acceptance, in-flight state, token frames, embeddings, hand-offs, measured prefill times."""
