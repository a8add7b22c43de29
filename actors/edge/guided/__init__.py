"""Structured output: JSON schemas, regular expressions, grammars and logits processors, checked at the edge."""
