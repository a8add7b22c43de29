"""A description of an unexpected exception by its type and place, without its message.

The message of an exception from a library may contain what it failed on: a prompt, an answer, a tool argument. Logs and
error responses get this description instead; messages are in the log at level debug.
"""

import traceback
from pathlib import Path
from typing import Final

PLACES_MAX: Final = 6


def failure_place(error: BaseException) -> str:
    """Type of an exception and where it was raised, innermost place first: `KeyError at a.py:12 f, b.py:3 g`."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES_MAX:]
    places = ", ".join(
        f"{Path(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames)
    )
    cause = error.__cause__
    after = f"; caused by {failure_place(cause)}" if cause is not None and cause is not error else ""
    return f"{type(error).__name__} at {places or 'no place'}{after}"
