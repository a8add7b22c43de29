"""What becomes of each field of a request: served, ignored, rejected or removed. The reference page is made of this. Pure."""

from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from headwater.actors.edge.request.fields import NAMES, NEUTRAL_VALUES, UnsupportedFields

FieldStatus = Literal["served", "ignored", "rejected", "removed"]

NOTHING: Final[Mapping[str, str]] = {}


class ApiEndpoint(NamedTuple):
    """One endpoint with a body, in JSON or as a form (`content`). `ignored` are known fields without effect here, each with the reason.

    `rejected` are fields of this endpoint's own that are refused: their accepted values, None for absent.
    """

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct]
    ignored: Mapping[str, str] = NOTHING
    rejected: Mapping[str, tuple[Any, ...]] = {}
    body_required: bool = True
    content: str = "application/json"


def statuses(endpoint: ApiEndpoint) -> dict[str, tuple[FieldStatus, str]]:
    """Status of each known field of a request, with a remark, in the order of its type."""
    found: dict[str, tuple[FieldStatus, str]] = {}
    rejected = dict(endpoint.rejected)
    if issubclass(endpoint.body, UnsupportedFields):
        rejected |= NEUTRAL_VALUES
    for field in msgspec.structs.fields(endpoint.body):
        name = field.encode_name
        if name in NAMES or name == "extra_body":
            found[name] = ("removed", "only the fleet may set it")
        elif name in rejected:
            found[name] = ("rejected", _accepted(rejected[name]))
        else:
            found[name] = ("served", "")
    for name, reason in endpoint.ignored.items():
        found[name] = ("ignored", reason)
    order: Final = ("served", "ignored", "rejected", "removed")
    return dict(sorted(found.items(), key=lambda item: order.index(item[1][0])))


def _accepted(values: tuple[Any, ...]) -> str:
    names = ["absent" if value is None else msgspec.json.encode(value).decode() for value in values]
    return "unless " + " or ".join(names)
