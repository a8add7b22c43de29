"""The edge: an OpenAI-compatible HTTP endpoint as an actor."""
