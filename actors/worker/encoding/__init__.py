"""Image embeddings between workers: computing and offering them on one side, reading them on the other."""
