"""What a request refers to: the responses or the conversation before it, and items by their ids."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from headwater.actors.edge.api.responses.items.stored import owner_of
from headwater.actors.edge.api.responses.items.types import Item
from headwater.actors.edge.api.responses.translate import ID_PREFIX
from headwater.actors.edge.api.responses.types import InputFields
from headwater.actors.edge.history.conversations import ConversationHead, ConversationStore
from headwater.actors.edge.history.objects import HISTORY_BYTES_MAX
from headwater.actors.edge.history.responses import (
    ResponseStore,
    StoredResponse,
    check_chain,
    not_found_before,
)
from headwater.actors.http.errors import ApiError, bad_request

LOCAL_RESPONSES_MAX: Final = 32
REFERENCES_MAX: Final = 256


class Stores(NamedTuple):
    """The stores of an edge."""

    responses: ResponseStore
    conversations: ConversationStore


class RequestHistory(NamedTuple):
    """What comes before a request's input. `chain`: the responses that it continues, the oldest first."""

    items: tuple[Item, ...] = ()
    chain: tuple[StoredResponse, ...] = ()
    conversation: ConversationHead | None = None

    @property
    def earlier(self) -> tuple[str, ...]:
        """Ids of the chain."""
        return tuple(response.id for response in self.chain)


class LocalResponses:
    """The newest responses of one WebSocket connection, stored or not, each with all before it. Bounded."""

    def __init__(self) -> None:
        self._chains: OrderedDict[str, tuple[StoredResponse, ...]] = OrderedDict()
        self._sizes: dict[str, int] = {}

    def add(self, chain: tuple[StoredResponse, ...]) -> None:
        """Keep the last response of a chain."""
        last = chain[-1]
        self._chains[last.id] = chain
        self._sizes[last.id] = len(msgspec.json.encode(last))
        while len(self._chains) > LOCAL_RESPONSES_MAX or sum(self._sizes.values()) > HISTORY_BYTES_MAX:
            self.discard(next(iter(self._chains)))

    def get(self, id_: str) -> tuple[StoredResponse, ...] | None:
        """A response's chain, None if it is not here (any more)."""
        return self._chains.get(id_)

    def discard(self, id_: str) -> None:
        """Remove a response."""
        self._chains.pop(id_, None)
        self._sizes.pop(id_, None)


async def load_history(
    fields: InputFields, tenant: str, stores: Stores | None, local: LocalResponses | None = None
) -> RequestHistory:
    """Read what a request refers to. Raises `ApiError` 400, 404 or 503."""
    previous, conversation = fields.previous_response_id, fields.conversation_id
    if conversation:
        if stores is None:
            raise storage_off("conversation")
        head = await stores.conversations.get(tenant, conversation)
        return RequestHistory(await stores.conversations.items(tenant, head), conversation=head)
    if not previous:
        return RequestHistory()
    chain = local.get(previous) if local is not None else None
    if chain is None:
        if stores is None:
            # A client recovers from this one, by sending its conversation again.
            raise not_found_before(previous, ": this server stores no responses")
        chain = await stores.responses.chain(tenant, previous)
    check_chain(len(chain))
    return RequestHistory(tuple(item for response in chain for item in response.items()), chain)


async def resolve_references(items: Sequence[Item], tenant: str, stores: Stores | None) -> list[Item]:
    """The items with those in place that it names by id. Raises `ApiError` 400 for an unknown id."""
    wanted = [item for item in items if is_reference(item)]
    if not wanted:
        return list(items)
    if len(wanted) > REFERENCES_MAX:
        raise bad_request(f"At most {REFERENCES_MAX} item references.", param="input")
    found: dict[str, Item] = {}
    owners = dict.fromkeys(owner_of(str(item.get("id"))) for item in wanted)
    for owner in owners:
        response = await stores.responses.get(tenant, ID_PREFIX + owner) if stores and owner else None
        for item in response.items() if response is not None else ():
            found[item["id"]] = item
    resolved: list[Item] = []
    for index, item in enumerate(items):
        if not is_reference(item):
            resolved.append(item)
        elif item["id"] in found:
            resolved.append(found[item["id"]])
        else:
            raise bad_request(
                f"input[{index}]: no stored response has this item (any more); send the item itself.",
                param=f"input[{index}].id",
                code="item_not_found",
            )
    return resolved


def is_reference(item: Item) -> bool:
    """Whether it stands for an item of a stored response."""
    kind = item.get("type")
    return isinstance(item.get("id"), str) and (
        kind == "item_reference" or (kind is None and "role" not in item)
    )


def storage_off(param: str) -> ApiError:
    """400 for a request that needs the store."""
    return bad_request(
        "This server stores no responses and conversations (--no-responses-store).",
        param=param,
        code="storage_disabled",
    )
