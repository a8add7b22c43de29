"""Image embeddings that encode workers compute for an SGLang: its store of them, and the proof that it uses them."""
