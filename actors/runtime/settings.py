"""Defaults that every actor shares."""

from typing import Final

DRAIN_TIMEOUT_S: Final = 15.0
"""Seconds that in-flight requests have to finish when an actor stops; then they migrate or fail."""
