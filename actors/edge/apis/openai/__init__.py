"""OpenAI's APIs of chat completions and completions."""
