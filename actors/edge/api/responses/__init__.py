"""OpenAI's Responses API: `/v1/responses` over HTTP and WebSocket, and `/v1/conversations`."""
