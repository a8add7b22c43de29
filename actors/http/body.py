"""Request bodies: read within limits, of one body and of all in flight at a server; then decoded, as JSON into msgspec types or as a form.

The shape of JSON is bounded, and errors name the field. The values in an error that a field may have are found in the type, as msgspec's own
errors have none.

Shape: compiled code measures it in one pass without the interpreter's lock, about a nanosecond a byte. What is inside strings is text and
costs a decoder nothing but copying.
"""

import asyncio
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import inspect
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from headwater.actors.http.asgi import ClientGone, Headers, Receive, Scope
from headwater.actors.http.errors import ApiError, bad_request, method_not_allowed, overloaded
from headwater.actors.limits import BodyLimits
from headwater.schemas.hashing import U8
from headwater.schemas.jit import kernel

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

T = TypeVar("T")

LENGTH_DIGITS_MAX: Final = 18

UNCOUNTED_BYTES: Final = 64 * 1024
"""Smaller bodies are not counted: the limit on connections bounds them."""


class Bodies:
    """Reads the bodies of one server and counts those in flight."""

    def __init__(self, limits: BodyLimits | None = None) -> None:
        self.limits = limits or BodyLimits()
        self.in_flight_bytes = 0

    def read(self, scope: Scope, receive: Receive) -> AbstractAsyncContextManager[bytes]:
        """The request's body, counted as in flight until the block ends.

        Raises `ApiError` 413 past the bound of one body, 503 past that of all, 415 for a compressed one, and `ClientGone`.
        """
        return _BodyInFlight(self, scope, receive)

    def check(self, size: int, held: int) -> None:
        """Raises `ApiError` for a body of this size, `held` bytes of which are counted already."""
        limits = self.limits
        if size > limits.bytes_max:
            raise ApiError(413, f"The body is larger than {limits.bytes_max} bytes.", code="body_too_large")
        if size > UNCOUNTED_BYTES and self.in_flight_bytes - held + size > limits.in_flight_bytes_max:
            raise overloaded(
                f"Request bodies in flight exceed {limits.in_flight_bytes_max} bytes; retry.", 1.0
            )


class _BodyInFlight:
    """See `Bodies.read`. An object and not a generator: the event loop keeps account of each of those, and every request has a body."""

    __slots__ = ("_bodies", "_held", "_receive", "_scope")

    def __init__(self, bodies: Bodies, scope: Scope, receive: Receive) -> None:
        self._bodies = bodies
        self._scope = scope
        self._receive = receive
        self._held = 0

    async def __aenter__(self) -> bytes:
        _check_encoding(self._scope)
        self._bodies.check(max(0, length_of(self._scope)), 0)
        try:
            # Not while they arrive: bodies that grow side by side fragment the heap to twice their size.
            parts = await self._parts()
            return parts[0] if len(parts) == 1 else b"".join(parts)
        except BaseException:
            self._release()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._release()

    async def _parts(self) -> list[bytes]:
        bodies, receive = self._bodies, self._receive
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGone
            part = message.get("body", b"")
            size += len(part)
            if size > UNCOUNTED_BYTES:
                bodies.check(size, self._held)
                bodies.in_flight_bytes += size - self._held
                self._held = size
            parts.append(part)
            if not message.get("more_body"):
                return parts

    def _release(self) -> None:
        self._bodies.in_flight_bytes -= self._held
        self._held = 0


def _check_encoding(scope: Scope) -> None:
    """Raises `ApiError` 415 for a compressed body: a few bytes of one could be gigabytes."""
    for name, value in scope["headers"]:
        if name == b"content-encoding" and value.lower() != b"identity":
            raise ApiError(
                415,
                f"content-encoding {value[:40].decode('latin-1')} is not supported: send the body uncompressed.",
                code="unsupported_content_encoding",
            )


def length_of(scope: Scope) -> int:
    """The value of content-length, -1 if it is missing. Raises `ApiError` 400 if it is invalid."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            if not value.isdigit() or len(value) > LENGTH_DIGITS_MAX:
                raise ApiError(400, "content-length is not a valid length.", code="invalid_header")
            return int(value)
    return -1


# The checks of endpoints: the method, and the body as a type.

_INVALID_VALUE: Final = re.compile(r"(Invalid (?:enum )?value) .*", re.DOTALL)
"""msgspec repeats a value that is none of those allowed; errors do not repeat what a client sent."""

_MISSING: Final = re.compile(r"Object missing required field `(\w+)`")

SHOWN_MAX: Final = 24
"""Longer lists of values are not shown."""

_STEP: Final = re.compile(r"\.(\w+)|\[[^\]]*\]")


def require_method(allowed: str, method: str) -> None:
    """Raises a 405 for another method than the allowed one."""
    if method != allowed:
        raise method_not_allowed(allowed)


def decode_body(kind: type[T], body: bytes) -> T:
    """A body as this type. Raises `ApiError` 400 naming the field."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise invalid_field(error, kind) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"The body is not valid JSON: {error}") from error


def invalid_field(error: msgspec.ValidationError, annotation: Any) -> ApiError:
    """400 naming the field at fault, or the one that is missing, and the values that it may have, of a body of this type."""
    message, _, where = str(error).partition(" - at `$")
    message, repeated = _INVALID_VALUE.subn(r"\1", message)
    param = where.rstrip("`").lstrip(".") or None
    missing = _MISSING.fullmatch(message)
    if missing is not None:
        param = f"{param}.{missing[1]}" if param else missing[1]
    elif repeated and param:
        values = allowed_values(annotation, param)
        message += f": it must be {'one of ' if len(values) > 1 else ''}{', '.join(values)}" if values else ""
    return bad_request(f"{message}" + (f" (at {param})" if param else ""), param=param)


def allowed_values(annotation: Any, path: str) -> tuple[str, ...]:
    """The values of the field at `path`, such as `messages[0].role`, in their order; empty if it is no choice, or a very long one."""
    steps = tuple(step[1] or "" for step in _STEP.finditer(f".{path}"))
    choices = tuple(dict.fromkeys(_values_at([_type_info(annotation)], steps)))
    return choices if len(choices) <= SHOWN_MAX else ()


@lru_cache
def _type_info(annotation: Any) -> inspect.Type:
    return inspect.type_info(annotation)


def _values_at(types: Iterable[inspect.Type], steps: tuple[str, ...]) -> Iterator[str]:
    """`steps`: names of fields, "" for an item of a list."""
    if not steps:
        for member_type in _members(types):
            if isinstance(member_type, inspect.LiteralType):
                yield from map(str, member_type.values)
            elif isinstance(member_type, inspect.EnumType):
                yield from (str(member.value) for member in member_type.cls)
        return
    step, rest = steps[0], steps[1:]
    for member_type in _members(types):
        yield from _values_at(list(_children(member_type, step)), rest)
        if not rest and isinstance(member_type, inspect.StructType) and member_type.tag_field == step:
            yield str(member_type.tag)


def _children(parent: inspect.Type, step: str) -> Iterator[inspect.Type]:
    if isinstance(parent, inspect.StructType):
        yield from (field.type for field in parent.fields if field.encode_name == step)
    elif isinstance(parent, inspect.DictType):
        yield parent.value_type
    elif not step and isinstance(parent, inspect.ListType | inspect.VarTupleType):
        yield parent.item_type


def _members(types: Iterable[inspect.Type]) -> Iterator[inspect.Type]:
    for member in types:
        if isinstance(member, inspect.UnionType):
            yield from _members(member.types)
        elif isinstance(member, inspect.Metadata):
            yield from _members([member.type])
        else:
            yield member


# The shape of a JSON text, measured before it is decoded: a decoder holds the GIL while it runs.

SMALL_BYTES: Final = 64 * 1024
"""A body up to this size is decoded in well under a millisecond, whatever its shape."""

INLINE_BYTES: Final = 1024 * 1024
"""A larger body is measured in a thread."""


class ShapeLimits(NamedTuple):
    """Limits of a body: objects and arrays, members of objects, values of arrays, levels, digits of a number, escapes, strings.

    A string costs a decoder several times what a number does; lists of numbers are prompts.
    """

    containers: int = 65_536
    members: int = 131_072
    values: int = 2_097_152
    depth: int = 128
    digits: int = 512
    escapes: int = 2_097_152
    strings: int = 524_288


LIMITS: Final = ShapeLimits()


@kernel
def count(data: U8) -> tuple[int, int, int, int, int, int, int]:
    """Objects and arrays, members, commas, deepest level, longest run of characters outside strings, escapes, strings."""
    escapes = strings = 0
    containers = members = values = depth = deepest = digits = longest = 0
    text = False
    at, size = 0, len(data)
    while at < size:
        byte = data[at]
        if text:
            if byte == 92:  # backslash
                escapes += 1
                at += 1
            elif byte == 34:
                text = False
        elif byte == 34:  # quote
            text = True
            strings += 1
            digits = 0
        elif byte == 123 or byte == 91:  # { [
            containers += 1
            depth += 1
            deepest = max(deepest, depth)
            digits = 0
        elif byte == 125 or byte == 93:  # } ]
            depth -= 1
            digits = 0
        elif byte == 58:  # :
            members += 1
            digits = 0
        elif byte == 44:  # ,
            values += 1
            digits = 0
        elif byte > 32:
            digits += 1
            longest = max(longest, digits)
        at += 1
    return containers, members, values, deepest, longest, escapes, strings


async def check_shape(body: bytes, limits: ShapeLimits = LIMITS) -> None:
    """Raises `ApiError` 400 if a body exceeds a limit."""
    if len(body) <= SMALL_BYTES:
        return
    data = np.frombuffer(body, np.uint8)
    if len(body) <= INLINE_BYTES:
        counts = count(data)
    else:
        counts = await asyncio.to_thread(count, data)
    containers, members, values, depth, digits, escapes, strings = counts
    for number, most, unit in (
        (containers, limits.containers, "objects and arrays"),
        (members, limits.members, "members of objects"),
        (values, limits.values, "values"),
        (depth, limits.depth, "levels"),
        (digits, limits.digits, "characters in a number"),
        (escapes, limits.escapes, "escaped characters"),
        (strings, limits.strings, "strings"),
    ):
        if number > most:
            raise _too_much(most, unit)


def _too_much(most: int, unit: str) -> ApiError:
    return bad_request(f"The body has more than {most} {unit}.", code="body_too_complex")


# Forms with files (multipart/form-data), read within limits.

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
        """Return what the parser calls."""
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
