"""Settings of stored responses: types, defaults and descriptions only. Light to import: the command line reads them."""

from typing import Annotated, NamedTuple

from msgspec import Meta

from headwater.events.table import STORED_BYTES_MAX


class HistorySettings(NamedTuple):
    """What the edge stores for `/v1/responses`, `/v1/conversations` and image URLs, and how long a connection lasts."""

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
    tenant_bytes_max: Annotated[
        int,
        Meta(
            ge=0,
            description="maximum bytes of what one tenant has stored; beyond it its own oldest objects are discarded; "
            "0: no bound of its own. Without authentication there is one tenant, and no such bound",
        ),
    ] = STORED_BYTES_MAX // 4
    image_ttl_s: int = 3600
    """Seconds after which a generated image that has a URL expires."""
    connection_s: Annotated[
        float,
        Meta(
            gt=0,
            description="seconds after which a WebSocket of the Responses API is closed, once it is idle",
        ),
    ] = 3600.0
