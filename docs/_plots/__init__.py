"""Draws the plots of the benchmark pages: `python -m docs._plots` (in the repository's root)."""
