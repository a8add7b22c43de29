"""Copies of streams: mirrors that servers of a hub keep of a site's streams, and backups by the server's own snapshots.

A site has a JetStream domain of its own, and its streams are complete without the hub. A mirror is kept by the servers themselves over a
leaf node. It has the name, the positions and the times of its
origin, and may leave kinds of events out: positions are then missing, and none is another's. It is read like its origin, and nothing can be
written to it. The server (2.15) rejects every alteration of what a mirror copies, and accepts that it stops being one.

A namespace is mirrored if its table of leases is a mirror. Nothing of it is created on these servers but mirrors: a stream of its own here
would take what the site's processes write, too, and both would acknowledge it.

A backup has every message with its position, time and headers. A copy by a consumer would give each message a new position, and
decisions, snapshots of routers and bookmarks name positions. The
server sends a stream's files as they are at one moment, in chunks that are acknowledged, and takes them back only under a name that no
stream has.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from headwater.events.jetstream.api import SECOND_NS, api, error_of, parse_time_ns, stream_info
from headwater.events.jetstream.stream_spec import (
    Mirror,
    StreamSpec,
    mirror_of,
    mirrored,
    namespace_streams,
    pool_log_stream,
)
from headwater.events.ports import LogRefused, LogUnavailable, StreamMissing
from headwater.events.table import StreamSizes
from headwater.schemas import subjects

SILENT_S: Final = 30.0
"""A mirror that heard nothing of its origin for so long has lost it: the server hears of it every second, and asks anew after ten."""


class MirroredHere(LogRefused):
    """The streams of this namespace are mirrors on these servers: its processes belong to the site."""


class MirrorStatus(msgspec.Struct, frozen=True):
    """How a mirror stands to its origin. `silent_s` is the time since it heard of it, -1: it never has."""

    site: str
    kinds: tuple[str, ...] = ()
    lag: int = 0
    silent_s: float = -1.0
    error: str = ""

    @property
    def trouble(self) -> str:
        """Why the copy does not go on; empty where it does."""
        if self.error:
            return f"mirror of site {self.site} stopped: {self.error}"
        if 0 <= self.silent_s < SILENT_S:
            return ""
        heard = f"{self.silent_s:.0f} s ago" if self.silent_s >= 0 else "never"
        return (
            f"mirror of site {self.site}, heard of {heard}: the site, its link or its stream is away; "
            "the copy goes on by itself once it is back"
        )


def status_of(info: Mapping[str, Any]) -> MirrorStatus | None:
    """The status in a STREAM.INFO reply; None where the stream is no mirror."""
    mirror = mirror_of(info["config"])
    if mirror is None:
        return None
    reported = info.get("mirror") or {}
    active = int(reported.get("active", -1))
    error = (reported.get("error") or {}).get("description", "")
    return MirrorStatus(
        mirror.site,
        mirror.kinds,
        int(reported.get("lag", 0)),
        active / SECOND_NS if active >= 0 else -1.0,
        error,
    )


async def site_of(client: Client, ns: str) -> str:
    """The site whose mirror this namespace is here; empty for a namespace of these servers. Raises `LogUnavailable`."""
    try:
        info = await stream_info(client, subjects.table_stream(subjects.lease_bucket(ns)))
    except StreamMissing:
        return ""
    mirror = mirror_of(info["config"])
    return mirror.site if mirror is not None else ""


async def refuse_mirrored(client: Client, ns: str) -> None:
    """Raises `MirroredHere` where the namespace is another site's."""
    if site := await site_of(client, ns):
        raise MirroredHere(
            f"the streams of namespace {ns} are mirrors of site {site} on these servers, and take no writes. Give --nats the servers of "
            f"the site; if it is lost for good, `headwater streams --promote --namespace {ns}` makes its copies here the originals"
        )


# Creation of mirrors, at the hub, as its operator.


class SiteStream(msgspec.Struct, frozen=True):
    """A stream of a site, as the site's servers describe it over the leaf node."""

    name: str
    subjects: tuple[str, ...]
    first: int
    last: int
    messages: int
    bytes: int
    spread_s: float
    """Time from its first to its last message."""
    created_ns: int


async def site_streams(client: Client, site: str) -> dict[str, SiteStream]:
    """All streams of a site by name. Raises `LogUnavailable` where the site does not answer."""
    streams: dict[str, SiteStream] = {}
    while True:
        try:
            page = await api(client, "STREAM.LIST", {"offset": len(streams)}, domain=site)
        except LogUnavailable as error:
            raise LogUnavailable(
                f"site {site} does not answer ({error}): its servers must be leaf nodes of these, with the JetStream domain {site}. "
                f"`headwater nats-config --namespace {site} --hub HOST:PORT` writes their configuration"
            ) from error
        infos = page.get("streams") or ()
        streams |= {info["config"]["name"]: described(info) for info in infos}
        if len(streams) >= int(page.get("total", 0)) or not infos:
            return streams


def described(info: Mapping[str, Any]) -> SiteStream:
    """A stream from its STREAM.INFO reply."""
    state = info["state"]
    first_ns, last_ns = parse_time_ns(state["first_ts"]), parse_time_ns(state["last_ts"])
    return SiteStream(
        info["config"]["name"],
        tuple(info["config"].get("subjects") or ()),
        int(state["first_seq"]),
        int(state["last_seq"]),
        int(state["messages"]),
        int(state["bytes"]),
        max(0, last_ns - first_ns) / SECOND_NS,
        parse_time_ns(info.get("created", "")),
    )


def mirror_specs(
    ns: str,
    streams_by_name: Mapping[str, SiteStream],
    mirror: Mirror,
    replicas: int,
    sizes: StreamSizes,
    *,
    requests: bool,
) -> list[StreamSpec]:
    """The originals of what is mirrored of a namespace: leases last, which make it a mirrored one.

    Of pools' logs those kinds that `mirror` names; with all kinds the snapshots, too, from which a fold of a long log begins.
    """
    prefix = subjects.pool_stream_prefix(ns)
    pools = [
        pool_log_stream(ns, name.removeprefix(prefix), replicas, sizes)
        for name, stream in sorted(streams_by_name.items())
        if name.startswith(prefix) and all(subjects.in_namespace(ns, subject) for subject in stream.subjects)
    ]
    mirrored_kinds = (
        {"model cards", "leases"}
        | ({"request log"} if requests else set())
        | (set() if mirror.kinds else {"objects"})
    )
    others = [spec for spec in namespace_streams(ns, replicas, sizes) if spec.what in mirrored_kinds]
    others.sort(key=lambda spec: spec.what == "leases")
    return [*pools, *(spec for spec in others if spec.name in streams_by_name)]


async def ensure_mirror(
    client: Client, origin: StreamSpec, mirror: Mirror, site_stream: SiteStream, *, anew: bool = False
) -> str:
    """Have these servers mirror a stream of a site; returns what was done: "created", "copied anew" or "".

    A mirror of something else is replaced if its origin still has all that it holds, or with `anew`. Raises `LogRefused`.
    """
    if not origin.pool:
        mirror = Mirror(mirror.site)
    spec = mirrored(origin, mirror)
    try:
        info = await stream_info(client, spec.name)
    except StreamMissing:
        await api(client, f"STREAM.CREATE.{spec.name}", spec.config())
        return "created"
    has = mirror_of(info["config"])
    if has is None:
        raise LogRefused(
            f"stream {spec.name} of these servers is no mirror: processes of this namespace write to it. Give the site a namespace of its own"
        )
    began_anew = site_stream.last < int(info["state"]["last_seq"]) or site_stream.created_ns > parse_time_ns(
        info["created"]
    )
    if has == mirror and not began_anew and not anew:
        return ""
    state = info["state"]
    lossless = not began_anew and (not int(state["messages"]) or site_stream.first <= int(state["first_seq"]))
    if not (lossless or anew):
        reason = "began anew at the site" if began_anew else "is shorter at the site by now"
        raise LogRefused(
            f"stream {spec.name} {reason}, and its copy here has what the site has not: `headwater mirror {mirror.site} --anew` drops that "
            "and copies again"
        )
    await api(client, f"STREAM.DELETE.{spec.name}")
    await api(client, f"STREAM.CREATE.{spec.name}", spec.config())
    return "copied anew"


async def promote(client: Client, original: StreamSpec) -> bool:
    """Make a mirror the original: from now on it takes writes, and copies nothing. False where it is no mirror. Raises `LogRefused`."""
    info = await stream_info(client, original.name)
    config: dict[str, Any] = info["config"]
    if mirror_of(config) is None:
        return False
    del config["mirror"]
    await api(client, f"STREAM.UPDATE.{original.name}", config | original.config())
    return True


# Backups.

CHUNK_BYTES: Final = 128 * 1024
WINDOW_BYTES: Final = 4 * 1024 * 1024
SILENCE_S: Final = 30.0
"""A server that sends or takes nothing for this long has given up."""

QUEUE_MAX: Final = 2 * WINDOW_BYTES // CHUNK_BYTES


class StreamCopy(msgspec.Struct, frozen=True):
    """What is known of a stream that was copied: its configuration, its state, and the size and SHA-256 of its copy."""

    config: dict[str, Any]
    state: dict[str, Any]
    bytes: int
    digest: str


async def snapshot_stream(client: Client, name: str, write: Callable[[bytes], object]) -> StreamCopy:
    """Copy a stream as of now through `write`; the server checks its checksums before. Raises `LogError`."""
    received: asyncio.Queue[Msg] = asyncio.Queue(QUEUE_MAX)
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox, cb=received.put)
    digest, size = hashlib.sha256(), 0
    try:
        body = {
            "deliver_subject": inbox,
            "no_consumers": True,
            "chunk_size": CHUNK_BYTES,
            "window_size": WINDOW_BYTES,
            "jsck": True,
        }
        answer = await api(client, f"STREAM.SNAPSHOT.{name}", body, SILENCE_S)
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await received.get()
            except TimeoutError as error:
                raise LogUnavailable(
                    f"stream {name}: the server sent nothing more of its snapshot for {SILENCE_S:g} s"
                ) from error
            if not message.data:
                _check_end(name, message)
                return StreamCopy(answer["config"], answer["state"], size, digest.hexdigest())
            await asyncio.to_thread(write, message.data)
            digest.update(message.data)
            size += len(message.data)
            if message.reply:
                await client.publish(message.reply, b"")
    finally:
        await subscription.unsubscribe()


def _check_end(name: str, message: Msg) -> None:
    """The last message is empty, and says in a header why there is no more. Raises `LogUnavailable` unless that is the end."""
    status = (message.headers or {}).get("Status", "")
    if status and not status.startswith("2"):
        reason = (message.headers or {}).get("Description", status)
        raise LogUnavailable(f"stream {name}: the server ended its snapshot: {reason}")


async def restore_stream(
    client: Client, config: dict[str, Any], state: dict[str, Any], chunks: Iterator[bytes]
) -> None:
    """Make a stream of this configuration and state from the chunks of its copy. Raises `LogError`, also where there is one of its name."""
    name = config["name"]
    answer = await api(client, f"STREAM.RESTORE.{name}", {"config": config, "state": state}, SILENCE_S)
    subject = answer["deliver_subject"]
    while chunk := await asyncio.to_thread(next, chunks, b""):
        await _send(client, subject, chunk)
    created = await _send(client, subject, b"")
    if not created:
        raise LogRefused(f"stream {name}: the server did not say that it was restored")


async def _send(client: Client, subject: str, chunk: bytes) -> dict[str, Any]:
    """Send one chunk and wait until the server has it. Raises `LogError`."""
    try:
        reply = await client.request(subject, chunk, timeout=SILENCE_S)
    except (NatsError, TimeoutError) as error:
        raise LogUnavailable(f"{subject}: the server took no more of the stream: {error!r}") from error
    document: dict[str, Any] = {}
    if reply.data.startswith(b"{"):
        document = msgspec.json.decode(reply.data)
    if document.get("error"):
        raise error_of(subject, document["error"])
    return document
