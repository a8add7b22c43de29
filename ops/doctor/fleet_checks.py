"""Checks of processes, pools and models, of facts alone: each is one function from facts to findings."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from headwater.engines import registry
from headwater.engines.launcher import launcher_type
from headwater.engines.releases import open_vulnerabilities
from headwater.ops.diagnosis.finding import Finding, Severity, finding
from headwater.ops.doctor.facts import Facts, PoolFacts
from headwater.router.fold.worker import Worker
from headwater.schemas.tables import Lease

PROMPTS_MIN: Final = 3
"""One prompt may have been aborted, and a second one evicted at once."""

RESTARTS: Final = 3
LAG_S_MAX: Final = 5.0

_OF_HISTORY: Final[dict[str, Severity]] = {"critical": "error", "warning": "warning", "info": "note"}


def check_leases(facts: Facts) -> Iterator[Finding]:
    """Is there an edge, and a router and a worker for each pool?"""
    leases = facts.leases
    if leases is None:
        return
    if not leases:
        yield finding("nothing-runs", f"namespace {facts.namespace}", "no edge, router or worker has a lease")
        return
    if not any(one.kind == "edge" for one in leases):
        yield finding("no-edge", f"namespace {facts.namespace}", "clients reach nothing: no edge has a lease")
    routed = _pools(leases, "router")
    served = _pools(leases, "worker")
    for pool in sorted(served - routed):
        yield finding("no-router", pool, "workers serve it, and no router has a lease")
    for pool in sorted((routed | {card.pool for card in facts.cards}) - served):
        yield finding("no-worker", pool, "no worker has a lease: requests for its model get 503")


def _pools(leases: Sequence[Lease], kind: str) -> set[str]:
    return {one.pool for one in leases if one.kind == kind and one.pool}


def check_stalled(facts: Facts) -> Iterator[Finding]:
    """Does the log take what processes append?"""
    stalled = [f"{one.kind} {one.name}" for one in facts.leases or () if one.stalled]
    if stalled:
        text = f"what {', '.join(stalled)} append is not accepted"
        yield finding("log-stalled", f"namespace {facts.namespace}", text)


def check_answers(facts: Facts) -> Iterator[Finding]:
    """Processes that have a lease and do not answer."""
    for one in facts.processes:
        if one.data is None:
            text = "it renews its lease, and does not answer within 2 s, asked twice"
            yield finding("process-silent", f"{one.kind} {one.name}", text)


def check_versions(facts: Facts) -> Iterator[Finding]:
    """One version of Headwater everywhere."""
    for one in facts.processes:
        if one.version and one.version != facts.version:
            yield finding(
                "versions-differ",
                f"{one.kind} {one.name}",
                f"has {one.version}; this command {facts.version}",
            )


def check_routers(facts: Facts) -> Iterator[Finding]:
    """Routers that lag, or whose states differ."""
    for one in facts.processes:
        data = one.data or {}
        if one.kind != "router":
            continue
        if data.get("lag_messages") and float(data.get("lag_s", 0.0)) > LAG_S_MAX:
            text = f"{data['lag_messages']} messages are unread, the newest folded one is {data['lag_s']:g} s old"
            yield finding("router-behind", f"router {one.name}", text)
        if others := data.get("diverged"):
            first = min(others.values())
            text = f"its state differs from that of {', '.join(sorted(others))} from position {first} on"
            yield finding("routers-differ", f"router {one.name}", text)


def check_restarts(facts: Facts) -> Iterator[Finding]:
    """Workers that join again and again."""
    for pool in facts.pools:
        for worker, times in sorted(pool.joined.items()):
            if times >= RESTARTS:
                yield finding("worker-restarts", worker, f"joined {pool.pool} {times} times in 15 minutes")


def check_history(facts: Facts) -> Iterator[Finding]:
    """What the console's overview shows of each pool that has processes."""
    live = {one.pool for one in facts.leases or () if one.kind == "worker"}
    for pool in facts.pools:
        if pool.pool not in live:
            # Said already: it has no worker.
            continue
        for one in pool.history:
            about = one.worker or one.request or pool.pool
            text = f"{one.title}: {one.text}"
            yield finding("pool-history", about, text, remedy=one.remedy, severity=_OF_HISTORY[one.severity])


def check_block_sizes(facts: Facts) -> Iterator[Finding]:
    """One block size for a model: among its pools with workers, and between a pool's card and its workers."""
    live = {one.pool: one.name for one in facts.leases or () if one.kind == "worker"}
    sizes: dict[str, dict[int, str]] = {}
    for card in facts.cards:
        if card.pool in live:
            sizes.setdefault(card.name, {})[card.block_size] = live[card.pool]
    for model, found in sizes.items():
        if len(found) > 1:
            text = ", ".join(
                f"{worker} has blocks of {size} tokens" for size, worker in sorted(found.items())
            )
            yield finding("block-size-differs", model, text)
    by_pool = {card.pool: card.block_size for card in facts.cards}
    for pool in facts.pools:
        for worker in pool.workers:
            wanted = by_pool.get(pool.pool, worker.block_size)
            if worker.block_size != wanted:
                text = f"has blocks of {worker.block_size} tokens; the pool's card says {wanted}"
                yield finding("block-size-differs", worker.name, text)


def check_model_files(facts: Facts) -> Iterator[Finding]:
    """The files that each worker of a model has, against those that each edge uses."""
    for missing in facts.missing_files:
        yield finding(
            "model-file-missing", missing.model, f"the {missing.what} of pool {missing.pool} is not stored"
        )
    used = {
        f"edge {one.name}": one.data.get("files", {})
        for one in facts.processes
        if one.kind == "edge" and one.data
    } or {"the model's card": {card.pool: msgspec.structs.asdict(card) for card in facts.cards}}
    for worker in facts.processes:
        if worker.kind != "worker" or not worker.data:
            continue
        for kind, file in (("tokenizer-differs", "tokenizer"), ("template-differs", "chat_template")):
            own, pool = worker.data.get(file, ""), worker.data.get("pool", "")
            others = [
                who
                for who, files in used.items()
                if own and files.get(pool, {}).get(file, own) not in ("", own)
            ]
            if others:
                what = file.replace("_", " ")
                text = f"its {what} ({own[:12]}) is not that of {', '.join(others)} for {worker.data.get('model')}"
                yield finding(kind, f"worker {worker.name}", text)


def check_kv_events(facts: Facts) -> Iterator[Finding]:
    """Engines that serve and announce nothing, or other blocks; and those whose announcements were lost."""
    for pool in facts.pools:
        for worker in pool.workers:
            served = pool.served.get(worker.name)
            if worker.role != "encode" and worker.announces and served and served.prompts >= PROMPTS_MIN:
                if not pool.stored.get(worker.name):
                    text = f"computed {served.prompts} prompts and published no KV event"
                    yield finding("kv-silent", worker.name, text)
                elif not served.announced:
                    text = f"published KV events, and of {served.prompts} prompts none has the hash that the edge computed"
                    yield finding("hashes-differ", worker.name, text)
            if worker.name in pool.cold:
                text = "KV events were lost: its cache does not count until it has announced it again"
                yield finding("kv-lost", worker.name, text)


def check_handoffs(facts: Facts) -> Iterator[Finding]:
    """Workers with a role whose KV no worker takes, or who get none."""
    for pool in facts.pools:
        yield from _handoffs(pool)


def _handoffs(pool: PoolFacts) -> Iterator[Finding]:
    for worker in pool.workers:
        if worker.role not in ("prefill", "decode"):
            continue
        other = "decode" if worker.role == "prefill" else "prefill"
        partners = [one for one in pool.workers if one.role in (other, "both") and one is not worker]
        if "handoff" not in worker.capabilities:
            text = f"is a {worker.role} worker, and its engine cannot hand over KV: it has no connector that does"
        elif not partners:
            text = f"is a {worker.role} worker, and the pool has no {other} worker"
        elif not any(_pair(worker, one) for one in partners):
            theirs = ", ".join(sorted({one.pairs_with or "nothing" for one in partners}))
            text = f"exchanges KV with {worker.pairs_with or 'nothing'} only, the pool's others with {theirs}"
        else:
            continue
        yield finding("handoff-impossible", worker.name, text)


def _pair(one: Worker, other: Worker) -> bool:
    return bool(one.pairs_with) and one.pairs_with == other.pairs_with and "handoff" in other.capabilities


def check_engines(facts: Facts) -> Iterator[Finding]:
    """Releases of engines, against published vulnerabilities. Those that do not matter behind an edge are notes."""
    for one in facts.processes:
        data = one.data or {}
        engine, version = str(data.get("engine", "")), str(data.get("engine_version", ""))
        known = launcher_type(engine).releases.vulnerabilities if engine in registry.all_traits() else ()
        found = open_vulnerabilities(version, known)
        for refused in (True, False):
            group = [each for each in found if each.refused == refused]
            if group:
                fixed = ".".join(map(str, max(each.fixed for each in group)))
                text = f"{engine} {version}: {'; '.join(f'{each.cve} {each.what}' for each in group)}; fixed in {fixed}"
                yield finding(
                    "engine-vulnerable", f"worker {one.name}", text, severity="error" if refused else "note"
                )


def check_keys(facts: Facts) -> Iterator[Finding]:
    """An edge that wants keys, while there is none."""
    wanting = [
        one.name for one in facts.processes if "keys" in str((one.data or {}).get("auth", "")).split(",")
    ]
    if wanting and facts.keys == 0:
        text = f"{', '.join(wanting)} wants API keys, and none is valid: every request gets 401"
        yield finding("no-api-key", f"namespace {facts.namespace}", text)
