"""Image embeddings outside vLLM: those that it computes for others, and those that others compute for it."""
