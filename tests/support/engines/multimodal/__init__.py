"""Tiny models that take images, videos or audio, with random weights, and what Hugging Face's implementation answers."""
