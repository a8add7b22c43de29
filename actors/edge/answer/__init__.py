"""The way from tokens to the client: choices, stop strings, and one stream of typed events."""
