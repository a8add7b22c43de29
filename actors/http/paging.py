"""Pages of lists: `after`, `limit` and `order`. Pure."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from headwater.actors.http.errors import bad_request

LIMIT_DEFAULT: Final = 20
LIMIT_MAX: Final = 100


class PageRequest(NamedTuple):
    """Which part of a list. `after` is the id of the last item that the client has."""

    after: str = ""
    limit: int = LIMIT_DEFAULT
    descending: bool = True


def page_request(query: bytes) -> PageRequest:
    """The page that a query string asks for. Raises `ApiError` 400."""
    given = dict(parse_qsl(query.decode("latin-1")))
    limit, order = given.get("limit", str(LIMIT_DEFAULT)), given.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= LIMIT_MAX):
        raise bad_request(f"limit must be from 1 to {LIMIT_MAX}.", param="limit")
    if order not in ("asc", "desc"):
        raise bad_request("order must be asc or desc.", param="order")
    return PageRequest(given.get("after", ""), int(limit), order == "desc")


def page_of(items: Sequence[dict[str, Any]], wanted: PageRequest) -> dict[str, Any]:
    """One page of items, whose order is the oldest first. Raises `ApiError` 400 for an unknown `after`."""
    ordered = list(reversed(items)) if wanted.descending else list(items)
    if wanted.after:
        ids = [item["id"] for item in ordered]
        if wanted.after not in ids:
            raise bad_request("after is not the id of an item of this list.", param="after")
        ordered = ordered[ids.index(wanted.after) + 1 :]
    page = ordered[: wanted.limit]
    return {
        "object": "list",
        "data": page,
        # Clients require strings.
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(ordered) > len(page),
    }
