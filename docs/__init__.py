"""The documentation; `docs._reference` writes the pages of `docs/reference`."""
