"""OpenAI's Responses API, over HTTP and WebSocket."""
