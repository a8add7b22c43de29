"""What text of files may be: no control characters, and a limit on its length."""

import re
from typing import Final

from headwater.actors.media.request.errors import MediaCode, MediaError
from headwater.actors.media.request.settings import FileLimits

CONTROLS: Final = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
"""No text has them; escape sequences of terminals are in logs, form feeds in old documents."""


def check_text_length(size: int, limits: FileLimits) -> None:
    """Raises `MediaError` for `size` bytes of text that are too many."""
    if size > limits.text_bytes_max:
        raise MediaError(
            MediaCode.TOO_MUCH_TEXT,
            f"The text of the file has {size} bytes or more; at most {limits.text_bytes_max} are accepted. Send a part of it.",
        )
