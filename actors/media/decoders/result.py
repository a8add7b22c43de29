"""What decoders return, and where they write the values."""

from typing import NamedTuple, Protocol


class Sink(Protocol):
    """Takes the values of an item, in order."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Append them."""
        ...


class DecodedMedia(NamedTuple):
    """A decoded item whose values are in a `Sink`. See `task.Decoded` for the fields."""

    dtype: str
    shape: tuple[int, ...]
    format: str
    seconds: float = 0.0
    times_s: tuple[float, ...] = ()
    grid: tuple[int, ...] = ()
