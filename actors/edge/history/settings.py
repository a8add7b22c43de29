"""Settings of stored responses: types, defaults and descriptions only. Light to import: the command line reads them."""

from typing import Annotated, NamedTuple

from msgspec import Meta


class HistorySettings(NamedTuple):
    """What the edge stores for `/v1/responses` and `/v1/conversations`."""

    store: Annotated[
        bool,
        Meta(
            description="store responses and conversations, with their prompts and answers, for clients that refer "
            "to them (Responses API); off: nothing is stored, and `store: true` is ignored"
        ),
    ] = True
    ttl_s: Annotated[
        int, Meta(ge=1, description="seconds after which a stored response or conversation item expires")
    ] = 72 * 3600
