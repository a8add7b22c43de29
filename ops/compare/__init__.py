"""Two engines of one model, compared by their answers to the same prompts."""
