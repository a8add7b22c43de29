"""`headwater mirror`: copies of a site's streams at a hub. And the end of a copy: `headwater streams --promote`."""

import asyncio

from headwater.events.jetstream import Connection
from headwater.events.jetstream.api import api
from headwater.events.jetstream.copies import (
    SiteStream,
    described,
    ensure_mirror,
    mirror_specs,
    promote,
    site_of,
    site_streams,
    status_of,
)
from headwater.events.jetstream.stream_spec import Mirror, StreamSpec, mirror_of
from headwater.events.jetstream.streams import RepairResult, wanted_streams
from headwater.events.jetstream.streams import repair as repair_stream
from headwater.events.ports import LogError, LogRefused, StreamMissing
from headwater.ops.config.sections import NatsSettings, StreamSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import connected
from headwater.schemas.subjects import POOL_KINDS

WITHOUT_KV = tuple(kind for kind in POOL_KINDS if kind != "kv")

LOOK_S = 5.0
"""How often `--watch` looks for new pools of the site."""

CURRENT_S = 60.0
POLL_S = 0.2


async def mirror(
    nats: NatsSettings,
    streams: StreamSettings,
    site: str,
    stop: asyncio.Event,
    *,
    kv: bool,
    requests: bool,
    anew: bool,
    watch: bool,
) -> int:
    """Mirror the namespace `site` of the JetStream domain `site`, and print what that costs; 1 where something is not current.

    With `watch` new pools are mirrored as they appear, until `stop` is set.
    """
    if site == nats.namespace:
        raise ConfigError(
            f"{site} is the namespace of this hub's own processes (--namespace): a site has a name of its own"
        )
    selection = Mirror(site, () if kv else WITHOUT_KV)
    async with connected(nats, "operator", "mirror") as client:
        streams_by_name = await site_streams(client, site)
        specs = mirror_specs(
            site, streams_by_name, selection, streams.replicas, streams.sizes, requests=requests
        )
        if not specs:
            raise ConfigError(
                f"site {site} has no streams of a namespace {site}: start its processes with --namespace {site}"
            )
        for spec in specs:
            done = await ensure_mirror(client, spec, selection, streams_by_name[spec.name], anew=anew)
            if done:
                print(f"{done} {spec.name}")
        current = [await _told(client, spec, streams_by_name[spec.name]) for spec in specs]
        while watch and not stop.is_set():
            try:
                async with asyncio.timeout(LOOK_S):
                    await stop.wait()
            except TimeoutError:
                await _look(client, site, selection, streams, requests=requests)
    return 0 if all(current) else 1


async def _look(
    client: Connection, site: str, selection: Mirror, streams: StreamSettings, *, requests: bool
) -> None:
    """Mirror what is new at the site; what cannot be done now is tried again."""
    try:
        streams_by_name = await site_streams(client, site)
        for spec in mirror_specs(
            site, streams_by_name, selection, streams.replicas, streams.sizes, requests=requests
        ):
            done = await ensure_mirror(client, spec, selection, streams_by_name[spec.name])
            if done:
                print(f"{done} {spec.name}", flush=True)
    except LogError as error:
        print(f"not now: {error}", flush=True)


async def _told(client: Connection, spec: StreamSpec, site_stream: SiteStream) -> bool:
    """Wait until a mirror has what its origin had, and print how much of it that is; False if that takes too long."""
    deadline = asyncio.get_running_loop().time() + CURRENT_S
    while True:
        info = await api(client, f"STREAM.INFO.{spec.name}")
        status = status_of(info)
        if status is not None and not status.lag and status.silent_s >= 0:
            break
        if asyncio.get_running_loop().time() > deadline:
            print(
                f"{spec.name}: not current within {CURRENT_S:.0f} s; it goes on by itself (`headwater streams`)"
            )
            return False
        await asyncio.sleep(POLL_S)
    local_stream = described(info)
    rates = ""
    if site_stream.spread_s >= 1:
        rates = f", {rate(local_stream.bytes / site_stream.spread_s)} of {rate(site_stream.bytes / site_stream.spread_s)}"
    print(f"{spec.name}: {local_stream.messages} of {site_stream.messages} messages{rates}")
    return True


def rate(bytes_per_s: float) -> str:
    """Bytes per second with a unit."""
    for unit, length in (("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= length:
            return f"{bytes_per_s / length:.3g} {unit}"
    return f"{bytes_per_s:.0f} B/s"


async def repair_mirrors(client: Connection, ns: str, streams: StreamSettings) -> list[RepairResult]:
    """Copy anew the mirrors of a namespace that lose nothing by it; the others say why not."""
    done: list[RepairResult] = []
    site = await site_of(client, ns)
    streams_by_name = await site_streams(client, site)
    for spec in await wanted_streams(client, ns, streams.replicas, streams.sizes):
        try:
            has = mirror_of((await api(client, f"STREAM.INFO.{spec.name}"))["config"])
            if has is not None and spec.name in streams_by_name:
                outcome = await ensure_mirror(client, spec, has, streams_by_name[spec.name])
                done.append(RepairResult(spec.name, created=bool(outcome)))
        except StreamMissing:
            continue
        except LogRefused as error:
            done.append(RepairResult(spec.name, refusal=str(error)))
    return done


async def promote_all(nats: NatsSettings, streams: StreamSettings) -> int:
    """Make the copies of a lost site its originals, and what was not copied anew. Raises `LogRefused` while the site is heard of."""
    ns = nats.namespace
    async with connected(nats, "operator", "streams") as client:
        site = await site_of(client, ns)
        if not site:
            raise ConfigError(f"--promote: the streams of namespace {ns} are no mirrors on these servers")
        specs = await wanted_streams(client, ns, streams.replicas, streams.sizes)
        # Leases last: until then a promotion that was interrupted can be run again.
        specs.sort(key=lambda spec: spec.what == "leases")
        for spec in specs:
            await _refuse_heard(client, spec, site)
        for spec in specs:
            try:
                if await promote(client, spec):
                    print(f"promoted {spec.name}")
            except StreamMissing:
                pass  # not copied: made below
        results = [await repair_stream(client, spec) for spec in specs]
    for result in results:
        if result.created:
            print(f"created {result.name}")
        if result.refusal:
            print(f"left {result.name}: {result.refusal}")
    return 0 if all(result.whole for result in results) else 1


async def _refuse_heard(client: Connection, spec: StreamSpec, site: str) -> None:
    try:
        status = status_of(await api(client, f"STREAM.INFO.{spec.name}"))
    except StreamMissing:
        return
    if status is not None and not status.trouble:
        raise LogRefused(
            f"stream {spec.name}: site {site} was heard of {status.silent_s:.0f} s ago, and two originals would diverge. Stop the site's NATS "
            "servers, or their connection to these, wait half a minute, and promote then"
        )
