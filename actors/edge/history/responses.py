"""Stored responses. Each has its own items and the ids of the responses before it, never a copy of their items."""

from typing import Any, Final

import msgspec

from headwater.actors.edge.history.objects import HISTORY_BYTES_MAX, TenantObjects
from headwater.actors.http.errors import ApiError, bad_request

CHAIN_MAX: Final = 512
"""Responses of a chain. A longer conversation needs compaction, or a conversation object."""


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One response. `input` and `resource["output"]` are items as the API shows them; `earlier` are the ids of the chain
    before it, the oldest first.
    """

    id: str
    earlier: tuple[str, ...] = ()
    input: tuple[dict[str, Any], ...] = ()
    resource: dict[str, Any] = {}

    def items(self) -> tuple[dict[str, Any], ...]:
        """What it adds to the conversation: input, then output."""
        return (*self.input, *self.resource["output"])


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(StoredResponse).decode


class ResponseStore:
    """Responses of all tenants."""

    def __init__(self, objects: TenantObjects) -> None:
        self._objects = objects

    async def put(self, tenant: str, response: StoredResponse) -> None:
        """Store a response. Raises `ApiError`."""
        await self._objects.put(tenant, "response", response.id, _encode(response))

    async def get(self, tenant: str, id_: str) -> StoredResponse | None:
        """A response, None if this tenant has none with the id (any more)."""
        found = await self._objects.get(tenant, "response", id_)
        return _decode(found.data) if found is not None else None

    async def delete(self, tenant: str, id_: str) -> bool:
        """Delete a response. False if there is none."""
        return await self._objects.delete(tenant, "response", id_)

    async def chain(self, tenant: str, id_: str) -> tuple[StoredResponse, ...]:
        """A response with all before it, the oldest first.

        Raises `ApiError` 400 if it is unknown, or if one before it was deleted or expired: an answer to half of a
        conversation would be wrong without a sign of it.
        """
        last = await self.get(tenant, id_)
        if last is None:
            raise not_found_before(id_)
        earlier = await self._objects.get_all(tenant, "response", last.earlier, HISTORY_BYTES_MAX)
        chain = [_decode(data) for data in earlier if data is not None]
        if len(chain) < len(earlier):
            raise not_found_before(id_, "; a response before it was deleted or expired")
        return (*chain, last)


def not_found_before(id_: str, why: str = "") -> ApiError:
    """400: there is nothing to continue."""
    return bad_request(
        f"Previous response with id '{id_}' not found{why}.",
        param="previous_response_id",
        code="previous_response_not_found",
    )


def check_chain(length: int) -> None:
    """Raises `ApiError` 400 if a chain of so many responses may not be continued."""
    if length >= CHAIN_MAX:
        raise bad_request(
            f"The chain has {length} responses, the maximum. Continue from POST /v1/responses/compact, or use a "
            "conversation.",
            param="previous_response_id",
            code="chain_too_long",
        )
