"""The documentation; `docs._reference` writes the pages of `docs/reference`, `docs._plots` draws the plots."""
