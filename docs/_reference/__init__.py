"""Writes the reference pages from the code: `python -m docs._reference` (in the repository's root)."""
