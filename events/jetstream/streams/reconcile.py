"""Reconciles the server's streams with their specifications: create, alter where no message is lost, report the rest.

Nothing here deletes or purges. An alteration sends the server's configuration with our fields replaced: an operator's
settings are kept, and a server in strict mode (2.12) receives no unknown field. JetStream has no compare-and-set for
configurations: two concurrent alterations may overwrite each other, and a repetition repairs that.
"""

from typing import Any

import msgspec
import structlog
from nats.aio.client import Client

from headwater.events.errors import AccessDenied, LogFull, LogRefused, LogUnavailable, StreamMissing
from headwater.events.jetstream.api import api
from headwater.events.jetstream.error_codes import INVALID_JSON, STREAM_NAME_IN_USE
from headwater.events.jetstream.streams.diff import StreamDifference, compare, repairable
from headwater.events.jetstream.streams.spec import StreamSpec

_log = structlog.get_logger("headwater.streams")


class RepairResult(msgspec.Struct, frozen=True):
    """The result for one stream. `left` are differences that remain; `refusal` says why, and what to do."""

    name: str
    created: bool = False
    altered: tuple[StreamDifference, ...] = ()
    left: tuple[StreamDifference, ...] = ()
    refusal: str = ""

    @property
    def whole(self) -> bool:
        """Does the stream now match its specification, except for its operator's settings?"""
        return not self.left and not self.refusal


async def repair(
    client: Client, wanted: StreamSpec, *, limits: bool = True, alter: bool = True
) -> RepairResult:
    """Create the stream, or alter what loses no messages; without `limits` limits are not changed.

    Without `alter` an existing stream is only compared: for a client without permission to alter it. Idempotent,
    and never deletes. What the server rejects is part of the result, except that a stream that cannot be created
    raises `LogRefused`, or `StreamMissing` when this client may not create it. Raises `LogUnavailable` when the
    server does not answer.
    """
    try:
        info = await api(client, f"STREAM.INFO.{wanted.name}")
    except StreamMissing:
        if await _create(client, wanted):
            return RepairResult(wanted.name, created=True)
        info = await api(client, f"STREAM.INFO.{wanted.name}")
    altered: list[StreamDifference] = []
    refusals: list[str] = []
    config: dict[str, Any] = info["config"]
    to_alter = repairable(compare(wanted, info), limits=limits)
    if to_alter and not alter:
        refusals.append(
            f"{', '.join(one.field for one in to_alter)} should be altered, and only the operator may: "
            "run `headwater streams --repair` with the operator's key"
        )
    for group in _groups(to_alter if alter else []):
        change = {one.field: one.wanted for one in group}
        try:
            config = (await api(client, f"STREAM.UPDATE.{wanted.name}", config | change))["config"]
        except LogRefused as error:
            refusals.append(f"the server rejected {', '.join(sorted(change))}: {error}")
        else:
            altered += group
    left = tuple(one for one in compare(wanted, {**info, "config": config}) if not one.operators)
    refusals += [_refusal(wanted, one) for one in left if one.cost != "safe"]
    return RepairResult(wanted.name, False, tuple(altered), left, "; ".join(refusals))


async def ensure(client: Client, wanted: StreamSpec, *, alter: bool = True) -> None:
    """Create a missing stream, add missing capabilities and replicas; every process does this at its start.

    Limits are not changed. What cannot be altered is logged and does not prevent the start, as the stream may work
    nevertheless. Raises as `repair` does.
    """
    done = await repair(client, wanted, limits=False, alter=alter)
    if done.altered:
        _log.info("stream_altered", stream=wanted.name, fields=[one.field for one in done.altered])
    if done.refusal:
        _log.warning("stream_differs", stream=wanted.name, reason=done.refusal)


def _groups(differences: list[StreamDifference]) -> list[list[StreamDifference]]:
    """Groups of alterations: the rejection of one group must not prevent the others."""
    kinds: dict[int, list[StreamDifference]] = {0: [], 1: [], 2: []}
    for one in differences:
        kinds[2 if one.field == "num_replicas" else int(one.limit)].append(one)
    return [group for group in kinds.values() if group]


async def _create(client: Client, wanted: StreamSpec) -> bool:
    """Create the stream. False when another process just created it with other settings."""
    try:
        await api(client, f"STREAM.CREATE.{wanted.name}", wanted.config())
    except AccessDenied as error:
        raise StreamMissing(
            f"stream {wanted.name} does not exist, and only the operator may create it: "
            "run `headwater pools` with the operator's key"
        ) from error
    except LogRefused as error:
        if error.code == STREAM_NAME_IN_USE:
            return False
        if error.code == INVALID_JSON:
            raise LogRefused(f"{error}; Headwater needs nats-server 2.14 or newer", error.code) from error
        raise
    except LogFull as error:
        # No space will be freed while a process starts: what is reserved has to be less.
        raise LogRefused(
            f"stream {wanted.name} reserves {max(wanted.max_bytes, 0)} bytes, which the NATS server's store does not have: {error}. Give "
            "smaller --pool-bytes-max, --requests-bytes-max or --responses-bytes-max, or the server a larger store"
        ) from error
    except LogUnavailable as error:
        raise LogUnavailable(f"stream {wanted.name} could not be created: {error}") from error
    return True


def _refusal(wanted: StreamSpec, one: StreamDifference) -> str:
    what = f"{one.field} is {one.has} and should be {one.wanted}"
    if one.cost == "would lose":
        return (
            f"{what}: altering it now would delete stored messages. If that is meant, "
            f"`nats stream edit {wanted.name}` does it"
        )
    return (
        f"{what}: no server alters that on an existing stream. Stop the fleet, back it up "
        f"(`nats stream backup {wanted.name} FOLDER`), delete it (`nats stream rm {wanted.name}`) and start again; "
        f"what is lost with it: {_HOLDS[wanted.what]}"
    )


_HOLDS = {
    "pool log": "routing history and decisions; workers reannounce themselves and their blocks",
    "request log": "the record of requests; requests in flight cannot be resumed",
    "leases": "nothing permanent: every process renews its lease",
    "model cards": "nothing permanent: workers write their cards again",
    "stored responses": "stored responses and conversations; clients must send their history again",
    "video jobs": "the record of videos: those in progress are not finished, finished ones cannot be found",
    "objects": "snapshots and tokenizer files; routers fold the log from its start, workers store the files again",
}
