"""Media in messages: the forms in which they come, neither fetched nor decoded. Pure.

What is in base64 is not looked at: the media intake decodes it in a process of its own, as megabytes of it would stop the event loop.
"""

import re
import unicodedata
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from headwater.actors.edge.generation.messages.turn import MediaKind, MediaPart
from headwater.actors.http.errors import bad_request

URL_CHARACTERS_MAX: Final = 8_192
NAME_CHARACTERS_MAX: Final = 255
UNNAMED: Final = "unnamed"

_DATA_URL: Final = re.compile(
    r"data:([\w.+-]{1,64}/[\w.+-]{1,64})?(?:;[\w.+-]{1,64}=[\w.+-]{1,64})*;base64,", re.IGNORECASE
)
"""Its type may be left out: the first bytes of the data decide what it is."""

_DATA: Final = "data:"


def url_media(kind: MediaKind, url: Any, param: str, *, detail: str = "") -> MediaPart:
    """Media behind a URL: https:, http:, file: or data: with base64. Which of them are accepted, the media intake decides. Raises `ApiError` 400 naming `param`."""
    if not isinstance(url, str) or not url:
        raise bad_request(f"{param} must have a URL.", param=param)
    if url[: len(_DATA)].lower() == _DATA:
        head = _DATA_URL.match(url[:512])
        if head is None:
            raise bad_request(f"{param} must be data:TYPE;base64,DATA.", param=param)
        return MediaPart(kind, param, url=url, media_type=(head[1] or "").lower(), detail=detail)
    if len(url) > URL_CHARACTERS_MAX:
        raise bad_request(f"{param} is longer than {URL_CHARACTERS_MAX} characters.", param=param)
    try:
        parts = urlsplit(url)
        valid = parts.scheme == "file" or (parts.scheme in ("http", "https") and bool(parts.hostname))
    except ValueError:
        valid = False
    if not valid:
        raise bad_request(f"{param} must be an https: or a data: URL.", param=param)
    return MediaPart(kind, param, url=url, detail=detail)


def file_media(
    param: str, *, name: Any = None, data: Any = None, url: Any = None, file_id: Any = None
) -> MediaPart:
    """A file: its bytes as a data URL or as base64, or a URL. Raises `ApiError` 400 naming the field at fault."""
    if file_id:
        raise bad_request(
            f"{param}.file_id names an upload, and this server has no files API. Send the file in {param}.file_data.",
            param=f"{param}.file_id",
        )
    if name is not None and not isinstance(name, str):
        raise bad_request(f"{param}.filename must be a string.", param=f"{param}.filename")
    if url and not data:
        part = url_media("file", url, f"{param}.file_url")
    elif isinstance(data, str) and data[: len(_DATA)].lower() == _DATA:
        part = url_media("file", data, f"{param}.file_data")
    else:
        part = data_media("file", data, f"{param}.file_data", media_type="")
    return msgspec.structs.replace(part, name=name or "")


def data_media(kind: MediaKind, data: Any, param: str, *, media_type: str, form: str = "") -> MediaPart:
    """Media as base64. Raises `ApiError` 400 naming `param` if there are none."""
    if not isinstance(data, str) or not data:
        raise bad_request(f"{param} must have base64 data.", param=param)
    return MediaPart(kind, param, data=data, media_type=media_type, format=form)


def audio_media(value: Any, param: str) -> MediaPart:
    """OpenAI's `input_audio`: base64 and the name of its encoding. Raises `ApiError` 400 naming the field at fault."""
    given = value if isinstance(value, dict) else {}
    form = given.get("format")
    if not isinstance(form, str) or not form.isalnum() or len(form) > 16:
        raise bad_request(f"{param}.format names the encoding, such as wav or mp3.", param=f"{param}.format")
    return data_media("audio", given.get("data"), param, media_type=f"audio/{form}", form=form)


def file_text(name: str, text: str) -> str:
    """A file as the model sees it: its text between lines that name it."""
    shown = shown_name(name)
    end = "" if text.endswith("\n") else "\n"
    return f"[File: {shown}]\n{text}{end}[End of file: {shown}]\n"


def shown_name(name: str) -> str:
    """A file's name on one line: without folders, control characters and brackets."""
    base = name.replace("\\", "/").rpartition("/")[2]
    plain = "".join(
        one for one in base if (one not in "[]" and unicodedata.category(one)[0] not in "CZ") or one == " "
    )
    return plain.strip()[:NAME_CHARACTERS_MAX] or UNNAMED
