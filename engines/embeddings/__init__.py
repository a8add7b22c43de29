"""Image embeddings apart from the engine that uses them: what encode workers share, and what engines that are given embeddings share."""
