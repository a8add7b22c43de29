"""Chat templates of published models, judged by what of a conversation is in the prompt."""
