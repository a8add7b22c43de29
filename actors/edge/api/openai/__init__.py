"""OpenAI's chat completions and completions: types, encoders and endpoints. Translation only."""
