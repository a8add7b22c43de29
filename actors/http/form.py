"""Forms with files (multipart/form-data), read within limits."""

import asyncio
from io import BytesIO
from typing import TYPE_CHECKING, Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headwater.actors.http.asgi import Headers
from headwater.actors.http.errors import ApiError, bad_request

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

FORM: Final = "multipart/form-data"

PARTS_MAX: Final = 64
FIELD_BYTES_MAX: Final = 64 * 1024

SLICE_BYTES: Final = 256 * 1024
"""Parsed in one turn of the event loop."""


class UploadForm:
    """Fields and files by name in the order of the body, each as its values. A name ends without `[]`, which marks lists."""

    def __init__(self) -> None:
        self.fields: dict[str, list[str]] = {}
        self.files: dict[str, list[bytes]] = {}


async def read_form(headers: Headers, body: bytes) -> UploadForm:
    """Read a form. Raises `ApiError` 400 naming what is wrong."""
    content = next((value for name, value in headers if name == b"content-type"), b"")
    kind, options = parse_options_header(content)
    if kind != FORM.encode() or not options.get(b"boundary"):
        raise bad_request(f"The content-type must be {FORM} with a boundary.", code="wrong_content_type")
    reader = _Reader()
    try:
        parser = MultipartParser(options[b"boundary"], reader.callbacks())
        for at in range(0, len(body), SLICE_BYTES):
            parser.write(body[at : at + SLICE_BYTES])
            if at:
                await asyncio.sleep(0)
    except FormParserError as error:
        raise bad_request(f"The body is not valid {FORM}: {error}.") from error
    if not reader.ended:
        raise bad_request(f"The body is not valid {FORM}: it ends before the last boundary.")
    return reader.form


class _Reader:
    """Receives the parts that the parser finds."""

    def __init__(self) -> None:
        self.form = UploadForm()
        self.ended = False
        self._parts = 0
        self._begin()

    def callbacks(self) -> "MultipartCallbacks":
        """What the parser calls."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._data,
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        self._headers: dict[bytes, bytes] = {}
        self._field = self._value = b""
        self._name, self._is_file = "", False
        self._content = BytesIO()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _headers_finished(self) -> None:
        self._parts += 1
        if self._parts > PARTS_MAX:
            raise bad_request(f"The form has more than {PARTS_MAX} parts.")
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace").removesuffix("[]")
        self._is_file = b"filename" in options
        if not self._name:
            raise bad_request("A part of the form has no name.")

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._content.write(memoryview(data)[start:end])
        if not self._is_file and self._content.tell() > FIELD_BYTES_MAX:
            raise self._refused(f"is longer than {FIELD_BYTES_MAX} bytes")

    def _end(self) -> None:
        content = self._content.getvalue()
        if self._is_file:
            self.form.files.setdefault(self._name, []).append(content)
            return
        try:
            text = content.decode()
        except UnicodeDecodeError:
            raise self._refused("is not UTF-8") from None
        self.form.fields.setdefault(self._name, []).append(text)

    def _finish(self) -> None:
        self.ended = True

    def _refused(self, why: str) -> ApiError:
        return bad_request(f"The field {self._name[:64]!r} {why}.", param=self._name)
