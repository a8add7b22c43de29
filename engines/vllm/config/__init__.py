"""vLLM's arguments: how they are built from settings, checked, and what they enable."""
