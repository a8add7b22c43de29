"""Making the server have the streams that are wanted: create, alter what loses nothing, refuse the rest.

Nothing here deletes or purges. An alteration sends the configuration as the server gave it with our fields
replaced: what an operator set stays, and a server in strict mode (2.12) meets no field that it does not know.
JetStream has no compare-and-set for configurations: two who alter one stream in the same moment overwrite
each other, and asking again mends it.
"""

from typing import Any

import msgspec
import structlog
from nats.aio.client import Client

from headwater.events.errors import AccessDenied, LogRefused, LogUnavailable, StreamMissing
from headwater.events.jetstream.api import api
from headwater.events.jetstream.error_codes import INVALID_JSON, STREAM_NAME_IN_USE
from headwater.events.jetstream.stream_compare import Difference, compare, repairable
from headwater.events.jetstream.stream_spec import StreamSpec

_log = structlog.get_logger("headwater.streams")


class Repaired(msgspec.Struct, frozen=True):
    """What became of one stream. `left` still needs somebody; `refusal` is why, and what to do."""

    name: str
    created: bool = False
    altered: tuple[Difference, ...] = ()
    left: tuple[Difference, ...] = ()
    refusal: str = ""

    @property
    def whole(self) -> bool:
        """Is the stream as wanted now, but for what its operator chose?"""
        return not self.left and not self.refusal


async def repair(client: Client, wanted: StreamSpec, *, limits: bool = True, alter: bool = True) -> Repaired:
    """Create the stream or alter what loses nothing; without `limits` limits stay as they are.

    Without `alter` an existing stream is only looked at: for a client that the server would deny it.
    Idempotent, and never deletes. What the server refuses is told in the answer, except that a stream that
    can not be created raises `LogRefused`, or `StreamMissing` when this client may not create it. Raises
    `LogUnavailable` when the server does not answer.
    """
    try:
        info = await api(client, f"STREAM.INFO.{wanted.name}")
    except StreamMissing:
        if await _create(client, wanted):
            return Repaired(wanted.name, created=True)
        info = await api(client, f"STREAM.INFO.{wanted.name}")
    altered: list[Difference] = []
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
            refusals.append(f"the server refused {', '.join(sorted(change))}: {error}")
        else:
            altered += group
    left = tuple(one for one in compare(wanted, {**info, "config": config}) if not one.operators)
    refusals += [_refusal(wanted, one) for one in left if one.cost != "safe"]
    return Repaired(wanted.name, False, tuple(altered), left, "; ".join(refusals))


async def ensure(client: Client, wanted: StreamSpec, *, alter: bool = True) -> None:
    """What every process does at its start: create a missing stream, add missing capabilities and replicas.

    Limits stay as they are, larger or smaller. What can not be altered is logged and does not keep the
    process from starting: the stream may serve nevertheless. Raises as `repair` does.
    """
    done = await repair(client, wanted, limits=False, alter=alter)
    if done.altered:
        _log.info("stream_altered", stream=wanted.name, fields=[one.field for one in done.altered])
    if done.refusal:
        _log.warning("stream_differs", stream=wanted.name, reason=done.refusal)


def _groups(differences: list[Difference]) -> list[list[Difference]]:
    """Alterations that go together: the refusal of one kind must not hinder the others."""
    kinds: dict[int, list[Difference]] = {0: [], 1: [], 2: []}
    for one in differences:
        kinds[2 if one.field == "num_replicas" else int(one.limit)].append(one)
    return [group for group in kinds.values() if group]


async def _create(client: Client, wanted: StreamSpec) -> bool:
    """Did we create it? False when another process did in this moment, with other settings than ours."""
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
    except LogUnavailable as error:
        raise LogUnavailable(f"stream {wanted.name} could not be created: {error}") from error
    return True


def _refusal(wanted: StreamSpec, one: Difference) -> str:
    what = f"{one.field} is {one.has} and should be {one.wanted}"
    if one.cost == "would lose":
        return (
            f"{what}: altering it now would delete stored messages. If that is meant, "
            f"`nats stream edit {wanted.name}` does it"
        )
    return (
        f"{what}: no server alters that on a stream that exists. Stop the fleet, keep a copy "
        f"(`nats stream backup {wanted.name} FOLDER`), delete it (`nats stream rm {wanted.name}`) and start again; "
        f"what goes with it: {_HOLDS[wanted.what]}"
    )


_HOLDS = {
    "pool log": "routing history and decisions; workers announce themselves and their blocks anew",
    "request log": "the record of requests; answers under way can not be taken up again",
    "leases": "nothing that lasts: every process takes its lease again",
    "model cards": "nothing that lasts: workers write their cards again",
    "objects": "snapshots and tokenizer files; routers fold the log from its start, workers store the files again",
}
