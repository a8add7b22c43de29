"""Image embeddings outside vLLM: files that its engine process reads and writes, and what keeps them."""
