"""Images in simulated fleets: what clients send, how edges decode it, and embeddings between workers."""
