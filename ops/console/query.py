"""Parameters of the console's API: numbers within bounds, texts, and choices, with errors that name the parameter."""

from collections.abc import Mapping
from typing import Any, Final, TypeVar, get_args
from urllib.parse import parse_qsl

from headwater.actors.http.errors import ApiError, bad_request

QUERY_BYTES_MAX: Final = 8 * 1024
PARAMETERS_MAX: Final = 64
TEXT_MAX: Final = 400

Chosen = TypeVar("Chosen", bound=str)


class Query:
    """The parameters of one request. Raises `ApiError` 400 for what a view cannot use."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values = values

    @classmethod
    def parse(cls, raw: bytes) -> "Query":
        """The parameters of a URL. Of one that is given twice the last counts."""
        if len(raw) > QUERY_BYTES_MAX:
            raise bad_request(f"The query is longer than {QUERY_BYTES_MAX} bytes.")
        try:
            pairs = parse_qsl(
                raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=PARAMETERS_MAX
            )
        except ValueError as error:
            raise bad_request(f"The query cannot be read: {error}.") from error
        return cls(dict(pairs))

    def text(self, name: str, default: str = "") -> str:
        """A text."""
        value = self.values.get(name, default)
        if len(value) > TEXT_MAX:
            raise bad_request(f"{name} is longer than {TEXT_MAX} characters.", param=name)
        return value

    def required(self, name: str) -> str:
        """A text that is not empty."""
        value = self.text(name)
        if not value:
            raise bad_request(f"{name} is missing.", param=name)
        return value

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        """A whole number within bounds."""
        number = self.optional(name, low, high)
        return default if number is None else number

    def optional(self, name: str, low: int = 0, high: int = 1 << 62) -> int | None:
        """A whole number within bounds, None where it is absent."""
        text = self.text(name)
        if not text:
            return None
        digits = text.removeprefix("-")
        if (
            not (digits.isascii() and digits.isdecimal() and len(digits) <= 19)
            or not low <= int(text) <= high
        ):
            raise bad_request(
                f"{name} must be a whole number from {low} to {high}, not {text[:40]!r}.", param=name
            )
        return int(text)

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A number within bounds."""
        text = self.text(name)
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            raise bad_request(
                f"{name} must be a number from {low:g} to {high:g}, not {text[:40]!r}.", param=name
            )
        return value

    def choice(self, name: str, kind: Any, default: str) -> Any:
        """One of the values of a `Literal`."""
        value = self.text(name) or default
        choices = get_args(kind)
        if value not in choices:
            raise bad_request(f"{name} must be one of {', '.join(choices)}, not {value[:40]!r}.", param=name)
        return value

    def flag(self, name: str) -> bool:
        """True for 1 and true."""
        return self.text(name).lower() in ("1", "true")

    def below(self, prefix: str) -> dict[str, str]:
        """The parameters whose names begin with a prefix, without it."""
        return {name[len(prefix) :]: self.text(name) for name in self.values if name.startswith(prefix)}


def not_found(message: str) -> ApiError:
    """404 for what the log does not hold."""
    return ApiError(404, message, code="not_found")
