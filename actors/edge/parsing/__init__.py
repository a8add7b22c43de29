"""Tool calls and reasoning in a model's output, found incrementally. Pure."""
