"""The byte budget of fetching one adapter, shared by all its readers, including threads."""

from headwater.engines.lora_files.errors import LoraError


class Budget:
    """Remaining bytes. An archive counts twice: compressed and decompressed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._given_up = False

    def spend(self, count: int) -> None:
        """Count bytes read. Raises `LoraError` beyond the limit, or after `cancel`."""
        self._left -= count
        if self._left < 0:
            raise LoraError(
                400, f"it has more than {self._limit >> 20} MiB, the limit for one adapter (--lora-max-mib)"
            )
        if self._given_up:
            raise LoraError(502, "it was cancelled")

    def reset(self) -> None:
        """Reset to the full limit."""
        self._left = self._limit

    def cancel(self) -> None:
        """Make every reading thread end soon: a thread cannot be cancelled directly."""
        self._given_up = True
