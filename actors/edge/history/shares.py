"""Shares of the store: a tenant that stores more than its share loses its own oldest objects, never another tenant's.

An edge counts what it writes for a tenant. Each `COUNTED` of a share it asks the store for the sizes of all that the
tenant has, which other edges wrote as well, and deletes the oldest objects down to `KEPT` of the share. So n edges exceed
a share by at most n × `COUNTED` of it, for a moment. No state outlives the edge, and a tenant that stores little costs no
query.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final, NamedTuple

import structlog

from headwater.actors import metrics
from headwater.events.errors import LogError
from headwater.events.table import KEY_BYTES, KeySize, Table
from headwater.schemas import subjects

COUNTED: Final = 1 / 8
KEPT: Final = 3 / 4

DEADLINE_S: Final = 8.0
"""What is not deleted by then is deleted at a later write."""

DELETES_AT_ONCE: Final = 16
TENANTS_MAX: Final = 10_000
"""Counted tenants; of those beyond, the ones that wrote least recently begin again."""

_log = structlog.get_logger("headwater.history")


class StoredObjectSize(NamedTuple):
    """All messages of one object: its head last, and the bytes that they hold of the store."""

    keys: tuple[str, ...]
    bytes: int


class TenantShares:
    """See the module. `bytes_max` is each tenant's share; 0: no bound."""

    def __init__(self, table: Table, bytes_max: int) -> None:
        self._table = table
        self._bytes_max = bytes_max
        self._written: OrderedDict[str, int] = OrderedDict()
        self._trimming: set[str] = set()

    async def note(self, tenant: str, messages: int, size: int) -> None:
        """`tenant` (as in keys) stores an object of so many messages and bytes: make room for it if needed."""
        if not self._bytes_max:
            return
        written = self._written.pop(tenant, 0) + messages * KEY_BYTES + size
        self._written[tenant] = written
        if len(self._written) > TENANTS_MAX:
            self._written.popitem(last=False)
        if written < self._bytes_max * COUNTED or tenant in self._trimming:
            return
        self._trimming.add(tenant)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await self._trim(tenant, written)
            self._written[tenant] = 0
        except (LogError, TimeoutError) as error:
            _log.warning("history_not_trimmed", reason=str(error) or "no answer in time")
        finally:
            self._trimming.discard(tenant)

    async def _trim(self, tenant: str, coming: int) -> None:
        objects = objects_of(await self._table.sizes(tenant))
        stored = sum(one.bytes for one in objects)
        # What is about to be written may be among them already, or not.
        if stored + coming <= self._bytes_max:
            return
        excess = stored - int(self._bytes_max * KEPT)
        doomed: list[StoredObjectSize] = []
        for one in objects:
            if excess <= 0:
                break
            doomed.append(one)
            excess -= one.bytes
        for first in range(0, len(doomed), DELETES_AT_ONCE):
            await asyncio.gather(*(self._delete(one) for one in doomed[first : first + DELETES_AT_ONCE]))
        metrics.HISTORY_TRIMMED.inc(len(doomed))
        _log.info("history_trimmed", objects=len(doomed), bytes_max=self._bytes_max)

    async def _delete(self, one: StoredObjectSize) -> None:
        # The head first: without it the object is absent.
        for key in reversed(one.keys):
            await self._table.delete(key, marker_s=1)


def objects_of(sizes: Iterable[KeySize]) -> list[StoredObjectSize]:
    """The objects that these messages make up, the oldest first; an object is as old as its newest message."""
    found: dict[str, list[KeySize]] = {}
    for one in sizes:
        found.setdefault(subjects.stored_object_of(one.key), []).append(one)
    newest = sorted(found.values(), key=lambda messages: max(one.revision for one in messages))
    return [
        StoredObjectSize(
            # Keys of chunks begin with the head's.
            tuple(one.key for one in sorted(messages, key=lambda one: -len(one.key))),
            sum(one.bytes + KEY_BYTES for one in messages),
        )
        for messages in newest
    ]
