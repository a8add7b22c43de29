"""A site without its hub, and a hub with the copy of a site's log: what is written where, read where, and repaired how."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headwater.events.jetstream.api import api
from headwater.events.jetstream.copies import SILENT_S, MirroredHere
from headwater.events.ports import LogRefused, LogUnavailable
from headwater.events.table import StreamSizes
from headwater.ops.config.sections import NatsSettings, StreamSettings
from headwater.ops.config.setting import ConfigError
from headwater.ops.nats.connect import connected, ports_of
from headwater.ops.operator import mirrors
from headwater.ops.operator.explain import explain
from headwater.ops.operator.replay import replay
from headwater.ops.operator.streams import streams
from headwater.schemas import subjects
from headwater.schemas.clock import SystemClock
from tests.bench.large_log import POOL, MadeUpFleet, write
from tests.faults.answers import client_of, settle, start, succeeds
from tests.support.processes.commands import ended
from tests.support.processes.fleet import fleet
from tests.support.servers.sites import HUB, SITE, Sites, hub_and_site

Out = pytest.CaptureFixture[str]
EVENTS = 3_000
SMALL = StreamSettings(sizes=StreamSizes(1 << 24, 1 << 26, 1 << 28))
LOG = subjects.pool_stream(SITE, POOL)


@pytest.fixture
async def sites(tmp_path: Path) -> AsyncIterator[Sites]:
    """A hub and a site, whose log has no event yet."""
    async with hub_and_site(tmp_path, "none") as made:
        yield made


@pytest.fixture
async def made_up(sites: Sites) -> MadeUpFleet:
    """The fleet whose events the site's log has."""
    made = MadeUpFleet(SITE, SystemClock())
    await write_log(sites, made, EVENTS)
    return made


async def mirrored(
    sites: Sites, namespace: str = HUB, stop: asyncio.Event | None = None, **flags: bool
) -> int:
    """`headwater mirror site-a` at the hub."""
    given = {"kv": False, "requests": False, "anew": False, "watch": False} | flags
    return await mirrors.mirror(sites.here(namespace), SMALL, SITE, stop or asyncio.Event(), **given)


async def replayed(sites: Sites, capsys: Out, *, at_site: bool = False) -> dict[str, Any]:
    """`headwater replay --verify --json` at the hub, or at the site; nothing if it fails at the hub."""
    code = await replay(sites.there if at_site else sites.here(), POOL, verify=True, as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert code == 0 or not at_site
    return json.loads(lines[-1]) if code == 0 else {}


async def write_log(
    sites: Sites, made_up: MadeUpFleet, events: int, where: NatsSettings | None = None
) -> None:
    """Events as a fleet at the site would write them, appended as its operator: there, or elsewhere."""
    async with ports_of(where or sites.there, "operator", "test", streams=SMALL) as ports:
        log: Any = await ports.pool_log(POOL)
        # A promotion has written a message of its own: what follows is decided behind it.
        made_up.state.position = (await log.bounds()).last
        await write(log._client, made_up, events, lambda _: None)


async def listed(sites: Sites, capsys: Out, **flags: bool) -> tuple[int, dict[str, Any]]:
    """`headwater streams --json` of the site's namespace at the hub, by stream."""
    capsys.readouterr()
    code = await streams(sites.here(), SMALL, repair=flags.get("repair", False), as_json=True)
    document = json.loads(capsys.readouterr().out)
    return code, {one["name"]: one for one in document["streams"]}


async def test_a_hub_reads_the_copy_of_a_sites_log(sites: Sites, made_up: MadeUpFleet, capsys: Out) -> None:
    """The positions are the origin's, and so are the decisions, each of which is made again; without the site, too."""
    assert await mirrored(sites, kv=True, requests=True) == 0
    told = capsys.readouterr().out
    assert f"created {LOG}" in told
    assert f"{LOG}: " in told
    code, found = await listed(sites, capsys)
    assert (code, found[LOG]["state"]) == (0, f"mirror of site {SITE}, current")
    at_site = await replayed(sites, capsys, at_site=True)
    sites.site.kill()
    assert await replayed(sites, capsys) == at_site
    assert at_site["verified"] > 0
    assert await explain(sites.here(), POOL, made_up.requests[-1]) == 0
    with pytest.raises(MirroredHere, match=f"mirrors of site {SITE}"):
        async with ports_of(sites.here(), "router", "router-0"):
            pass


async def test_without_kv_events_a_replay_says_what_it_lacks(
    sites: Sites, made_up: MadeUpFleet, capsys: Out
) -> None:
    """The copy has all other events at their positions, in a fraction of the bytes; asked for all, it is copied anew, as nothing is lost."""
    assert await mirrored(sites) == 0
    code, found = await listed(sites, capsys)
    assert code == 0
    assert found[LOG]["mirror"]["kinds"] == list(mirrors.WITHOUT_KV)
    assert subjects.request_stream(SITE) not in found
    assert await explain(sites.here(), POOL, made_up.requests[-1]) == 0
    with pytest.raises(ConfigError, match=r"without its KV-cache events.*--kv"):
        await replay(sites.here(), POOL, verify=True)
    capsys.readouterr()
    assert await mirrored(sites, kv=True) == 0
    assert f"copied anew {LOG}" in capsys.readouterr().out
    assert await replay(sites.here(), POOL, verify=True) == 0


@pytest.mark.soak
@pytest.mark.timeout(180)
async def test_a_site_writes_without_its_hub_and_the_copy_catches_up(
    sites: Sites, made_up: MadeUpFleet, capsys: Out
) -> None:
    """Nothing at the site waits for the hub; what it wrote meanwhile is copied when the hub is back."""
    assert await mirrored(sites, kv=True) == 0
    sites.hub.kill()
    await write_log(sites, made_up, EVENTS)
    at_site = await replayed(sites, capsys, at_site=True)
    await sites.hub.restart()
    # The hub's server asks for the site again after up to a minute.
    async with asyncio.timeout(120):
        while await replayed(sites, capsys) != at_site:
            await asyncio.sleep(0.2)


@pytest.mark.soak
@pytest.mark.timeout(180)
async def test_the_copy_of_a_lost_site_becomes_the_original(
    sites: Sites, made_up: MadeUpFleet, capsys: Out
) -> None:
    """While the site is heard of it is refused: two originals would diverge. Then the copy takes writes, and continues the log."""
    assert await mirrored(sites, kv=True) == 0
    with pytest.raises(LogRefused, match="two originals would diverge"):
        await mirrors.promote_all(sites.here(), SMALL)
    sites.site.kill()
    async with asyncio.timeout(4 * SILENT_S):
        while (await listed(sites, capsys))[0] == 0:
            await asyncio.sleep(1.0)
    _, found = await listed(sites, capsys)
    assert found[LOG]["state"].startswith(f"mirror of site {SITE}, heard of ")
    with pytest.raises(LogUnavailable, match="must be leaf nodes"):
        await mirrored(sites, kv=True)
    assert await mirrors.promote_all(sites.here(), SMALL) == 0
    assert f"promoted {LOG}" in capsys.readouterr().out
    code, found = await listed(sites, capsys)
    assert (code, found[LOG]["state"]) == (0, "as wanted")
    await write_log(sites, made_up, EVENTS, sites.here())
    capsys.readouterr()
    assert await replay(sites.here(), POOL, verify=True) == 0


async def test_a_log_that_began_anew_is_not_mixed_with_its_copy(sites: Sites, capsys: Out) -> None:
    """The copy keeps what the site lost until it is told to drop that."""
    await write_log(sites, MadeUpFleet(SITE, SystemClock()), EVENTS)
    assert await mirrored(sites, kv=True) == 0
    async with connected(sites.there, "operator", "test") as client:
        await api(client, f"STREAM.DELETE.{LOG}")
    await write_log(sites, MadeUpFleet(SITE, SystemClock()), 100)
    with pytest.raises(LogRefused, match=rf"began anew at the site.*headwater mirror {SITE} --anew"):
        await mirrored(sites, kv=True)
    capsys.readouterr()
    code, _ = await listed(sites, capsys, repair=True)
    assert code == 1
    assert await mirrored(sites, kv=True, anew=True) == 0
    assert f"copied anew {LOG}" in capsys.readouterr().out
    assert await replay(sites.here(), POOL, verify=True) == 0


async def test_nobody_mirrors_what_is_written_here(sites: Sites) -> None:
    """A hub whose own processes have the site's namespace would take the site's writes as its own."""
    async with ports_of(sites.here(), "operator", "test", streams=SMALL):
        pass
    await write_log(sites, MadeUpFleet(SITE, SystemClock()), 100)
    with pytest.raises(LogRefused, match="Give the site a namespace of its own"):
        await mirrored(sites)
    counts = []
    for where in (sites.there, sites.here()):
        async with connected(where, "operator", "test") as client:
            info = await api(client, f"STREAM.INFO.{subjects.request_stream(SITE)}")
            counts.append(info["state"]["messages"])
    written, taken = counts
    assert written > taken == 0, "made by mistake at the hub, it takes what is written at the site"
    with pytest.raises(ConfigError, match="a site has a name of its own"):
        await mirrored(sites, SITE)


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(240)
async def test_a_fleet_serves_without_its_hub(tmp_path: Path, capsys: Out) -> None:
    """With the keys that both configurations grant: it answers while the hub is away, and the hub shows and drains it while it is there."""
    async with hub_and_site(tmp_path) as sites:
        access = ("--nats-keys-dir", sites.site_keys, "--namespace", SITE)
        async with fleet(tmp_path, "--engine", "sim", "--nats", sites.site.url, access=access) as up:
            async with client_of(up.url) as client:
                assert not await succeeds(client)
                at_hub = ("--nats", sites.hub.url, "--nats-keys-dir", sites.hub_keys)
                end = await ended("mirror", SITE, *at_hub, "--namespace", HUB, within_s=60)
                assert end.code == 0, end.output
                print(end.output)
                for words in (("streams",), ("log",), ("ctl", "list"), ("ctl", "worker-1", "drain")):
                    end = await ended(*words, *at_hub, "--namespace", SITE, within_s=60)
                    assert end.code == 0, end.output
                    print(end.output)
                sites.hub.kill()
                answers = start(client, 4, 300)
                assert not await settle(answers, stalled_s=10.0)
                assert not await succeeds(client)
                await sites.hub.restart()
        assert sites.hub.violations() == []
        assert sites.site.violations() == []


async def test_new_pools_are_mirrored_while_it_watches(
    sites: Sites, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """Also after the site did not answer for a while; it ends when it is told to."""
    monkeypatch.setattr(mirrors, "LOOK_S", 0.1)
    stop = asyncio.Event()
    await write_log(sites, MadeUpFleet(SITE, SystemClock()), 100)
    watching = asyncio.create_task(mirrored(sites, stop=stop, watch=True))
    told = ""

    async def until(words: str) -> None:
        nonlocal told
        while words not in told:
            await asyncio.sleep(0.05)
            told += capsys.readouterr().out

    async with asyncio.timeout(60):
        await until(f"{LOG}: ")
        sites.site.kill()
        await until("not now: ")
        await sites.site.restart()
        async with ports_of(sites.there, "operator", "test", streams=SMALL) as ports:
            await ports.pool_log("new")
        await until(f"created {subjects.pool_stream(SITE, 'new')}")
        stop.set()
        assert await watching == 0
