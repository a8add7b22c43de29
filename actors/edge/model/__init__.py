"""A model at the edge: its card, tokenizer, chat template and stop strings."""
