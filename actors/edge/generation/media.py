"""Media in messages: the forms in which they come, neither fetched nor decoded. Pure.

What is in base64 is not looked at: the media intake decodes it in a process of its own, as megabytes of it would stop the event loop.
"""

import re
from typing import Any, Final
from urllib.parse import urlsplit

from headwater.actors.edge.generation.request import MediaKind, MediaPart
from headwater.actors.http.errors import bad_request

URL_CHARACTERS_MAX: Final = 8_192

_DATA_URL: Final = re.compile(r"data:([\w.+-]{1,64}/[\w.+-]{1,64})(?:;[\w.+-]{1,64}=[\w.+-]{1,64})*;base64,")


def url_media(
    kind: MediaKind, url: Any, param: str, *, detail: str = "", only_data: bool = False
) -> MediaPart:
    """Media behind a URL: https:, http: or data: with base64. Raises `ApiError` 400 naming `param`."""
    if not isinstance(url, str) or not url:
        raise bad_request(f"{param} must have a URL.", param=param)
    if url.startswith("data:"):
        head = _DATA_URL.match(url[:512])
        if head is None:
            raise bad_request(f"{param} must be data:TYPE;base64,DATA.", param=param)
        return MediaPart(kind, param, url=url, media_type=head[1], detail=detail)
    if only_data:
        raise bad_request(f"{param} must be data:TYPE;base64,DATA.", param=param)
    if len(url) > URL_CHARACTERS_MAX:
        raise bad_request(f"{param} is longer than {URL_CHARACTERS_MAX} characters.", param=param)
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        valid = False
    if not valid:
        raise bad_request(f"{param} must be an https: or a data: URL.", param=param)
    return MediaPart(kind, param, url=url, detail=detail)


def data_media(kind: MediaKind, data: Any, param: str, *, media_type: str, form: str = "") -> MediaPart:
    """Media as base64. Raises `ApiError` 400 naming `param` if there are none."""
    if not isinstance(data, str) or not data:
        raise bad_request(f"{param} must have base64 data.", param=param)
    return MediaPart(kind, param, data=data, media_type=media_type, format=form)
