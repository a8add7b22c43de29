"""How much of embeddings is kept where nothing else is set. Light to import: the command line reads it."""

from typing import Final

EMBEDDINGS_MIB: Final = 256
"""Room of one worker for embeddings of images, in MiB."""
