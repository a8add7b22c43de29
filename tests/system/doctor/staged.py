"""Which test stages each kind of finding, and the command's JSON."""

import asyncio
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from tests.support.processes.commands import ended

STAGED: Final[dict[str, frozenset[str]]] = {
    "a server with odd settings": frozenset({"payload-small", "nats-open", "sync-rare", "store-full"}),
    "streams": frozenset({"stream-missing", "stream-differs", "snapshot-behind", "nothing-runs"}),
    "no JetStream": frozenset({"jetstream-off"}),
    "an old server": frozenset({"nats-old", "nats-faulty"}),
    "out of reach": frozenset(
        {"nats-unreachable", "port-taken", "engine-memory", "engine-cuda", "engine-connector", "engine-port"}
    ),
    "denied": frozenset({"nats-denied", "key-file-readable"}),
    "two fleets": frozenset({"two-fleets"}),
    "a cluster": frozenset({"stream-behind", "stream-silent"}),
    "a full disk": frozenset({"store-frozen", "disk-full"}),
    "engines": frozenset(
        {
            "kv-silent", "hashes-differ", "template-differs", "engine-vulnerable",
            "handoff-impossible", "engine-socket-open", "no-api-key",
        }
    ),
    "processes and logs": frozenset(
        {
            "log-stalled", "no-edge", "no-router", "no-worker", "process-silent", "versions-differ", "router-behind", "routers-differ",
            "worker-restarts", "pool-history", "kv-lost", "clock-off", "block-size-differs", "model-file-missing", "tokenizer-differs",
        }
    ),
}  # fmt: skip
"""What each test of this folder stages, by its subject. A test fails where a kind of the table is in none."""


class Diagnosis(NamedTuple):
    """What the command found: its exit code, and its document."""

    code: int
    document: dict[str, Any]

    @property
    def ids(self) -> set[str]:
        """The kinds that were found."""
        return {one["id"] for one in self.document["findings"]}

    @property
    def skipped(self) -> set[str]:
        """The kinds that were not looked for."""
        return {one["finding"] for one in self.document["skipped"]}

    def of(self, kind: str) -> dict[str, str]:
        """What each finding of a kind says, by what it is about."""
        found: dict[str, str] = {}
        for one in self.document["findings"]:
            if one["id"] == kind:
                found[one["about"]] = "; ".join(filter(None, (found.get(one["about"]), one["text"])))
        return found


async def diagnosis(*flags: str) -> Diagnosis:
    """Run the command; its document has a remedy for each finding."""
    end = await ended("doctor", "--json", *flags, within_s=60)
    line = next((line for line in end.output.splitlines() if line.startswith("{")), "")
    assert line, end.output
    found = Diagnosis(end.code, msgspec.json.decode(line))
    assert all(one["remedy"] and one["about"] and one["text"] for one in found.document["findings"])
    return found


async def diagnosis_once(is_wanted: Callable[[Diagnosis], bool], *flags: str) -> Diagnosis:
    """The first diagnosis that is as wanted, within a minute."""
    last = await diagnosis(*flags)
    try:
        async with asyncio.timeout(60):
            while not is_wanted(last):
                await asyncio.sleep(0.2)
                last = await diagnosis(*flags)
    except TimeoutError as error:
        raise AssertionError(f"found: {last.document['findings']}") from error
    return last
