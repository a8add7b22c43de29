"""Rate limits of clients: requests and tokens per minute, concurrent requests and context length, shared by all edges."""
