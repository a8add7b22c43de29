"""What fetching one adapter may take, shared by everything that reads for it, in threads too."""

from headwater.engines.adapter_files.errors import AdapterError


class Budget:
    """Bytes that are left. Reading counts twice where an archive is unpacked: once packed, once unpacked."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = limit
        self._given_up = False

    def spend(self, count: int) -> None:
        """Take note of bytes read. Raises `AdapterError` past the limit, or when nobody waits any more."""
        self._left -= count
        if self._left < 0:
            raise AdapterError(
                400, f"it has more than {self._limit >> 20} MiB; --lora-max-mib is what an adapter may have"
            )
        if self._given_up:
            raise AdapterError(502, "it was given up")

    def again(self) -> None:
        """The same limit from the start."""
        self._left = self._limit

    def give_up(self) -> None:
        """Make every thread that still reads end soon: a thread can not be cancelled."""
        self._given_up = True
