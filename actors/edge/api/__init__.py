"""The OpenAI API of the edge: request types, validation, responses."""
