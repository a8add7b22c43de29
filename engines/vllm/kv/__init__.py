"""vLLM's KV-cache events: socket, wire format, translation to log events."""
