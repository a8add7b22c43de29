"""The doctor's checks, each on the least facts that have or lack what it finds."""

from typing import Any

import pytest

from headwater.ops.debug.doctor import as_text, diagnose
from headwater.ops.debug.doctor_facts import (
    ClockFacts,
    Facts,
    Listener,
    LocalFleet,
    MachineFacts,
    PoolFacts,
    ProcessFacts,
    Served,
    Skipped,
    Unreachable,
    WantedPort,
)
from headwater.ops.diagnosis import KINDS, Finding
from headwater.ops.history.findings import Finding as HistoryFinding
from headwater.router.worker import Worker
from headwater.schemas.tables import Lease

NOTHING = Facts("nats://127.0.0.1:4222", "default", "1.0")
LEASES = (
    Lease(kind="edge", name="e", host="here"),
    Lease(kind="router", name="r", pool="p", host="here"),
    Lease(kind="worker", name="w", pool="p", host="here"),
)
HEALTHY = NOTHING._replace(leases=LEASES)


def ids(facts: Facts) -> list[str]:
    """The kinds that are found."""
    return [one.id for one in diagnose(facts)]


def the(facts: Facts) -> Finding:
    """The only finding."""
    (found,) = diagnose(facts)
    return found


def worker(name: str = "w", role: Any = "both", **fields: Any) -> Worker:
    """A worker as a pool's log describes it."""
    return Worker(name, 1, "sim", role, 16, 100, 8, **fields)


def pool(*workers: Worker, **fields: Any) -> Facts:
    """A healthy fleet with this pool."""
    return HEALTHY._replace(pools=(PoolFacts("p", workers, **fields),))


def test_a_healthy_fleet_and_no_facts_have_no_finding() -> None:
    """What is unknown is not found."""
    assert ids(HEALTHY) == []
    assert ids(NOTHING) == []


@pytest.mark.parametrize(
    ("behind_s", "messages", "wanted"),
    [
        (0.9, 10, ""),
        (1.5, 10, "1.5 s behind"),
        # So few may all have been late.
        (1.5, 2, ""),
        (-1.5, 1, "1.5 s ahead of"),
    ],
)
def test_a_clock_is_off_from_a_second_on(behind_s: float, messages: int, wanted: str) -> None:
    """Ahead already by one message: none is stored before it is written."""
    facts = pool(worker(), clocks=(ClockFacts("far", behind_s, messages),))
    assert [one.about for one in diagnose(facts)] == (["far"] if wanted else [])
    if wanted:
        assert wanted in the(facts).text


def test_the_worst_of_a_machines_clocks_is_shown() -> None:
    """Once for each machine, however many pools it has."""
    clocks = (ClockFacts("far", 2.0, 9), ClockFacts("far", 5.0, 9), ClockFacts("far", 3.0, 9))
    facts = pool(worker(), clocks=clocks)._replace(own_clock=ClockFacts("this machine", -4.0, 3))
    assert {one.about: one.text.split(" s ")[0] for one in diagnose(facts)} == {
        "far": "its clock is 5.0",
        "this machine": "its clock is 4.0",
    }


@pytest.mark.parametrize(
    ("served", "stored", "role", "wanted"),
    [
        (Served(3, 0), 0, "both", ["kv-silent"]),
        (Served(2, 0), 0, "both", []),
        (Served(3, 0), 5, "both", ["hashes-differ"]),
        (Served(3, 1), 5, "both", []),
        (Served(3, 0), 0, "encode", []),
    ],
)
def test_kv_events_are_judged_by_three_prompts(
    served: Served, stored: int, role: Any, wanted: list[str]
) -> None:
    """Encode workers have none."""
    assert ids(pool(worker(role=role), served={"w": served}, stored={"w": stored})) == wanted


def test_an_engine_that_declares_no_kv_events_need_not_publish_any() -> None:
    """Routers then reckon with what they sent it."""
    facts = pool(worker(capabilities=("generate",)), served={"w": Served(9, 0)}, stored={"w": 0})
    assert ids(facts) == []


HANDOFF = ("generate", "handoff")


@pytest.mark.parametrize(
    ("others", "wanted"),
    [
        ([("d", "decode", "a", HANDOFF)], ""),
        ([("b", "both", "a", HANDOFF)], ""),
        ([], "has no decode worker"),
        ([("d", "decode", "b", HANDOFF)], "with a only, the pool's others with b"),
        ([("b", "both", "a", ("generate",))], "the pool's others with a"),
        ([("x", "prefill", "a", HANDOFF)], "has no decode worker"),
    ],
)
def test_a_prefill_worker_needs_a_partner(others: list[Any], wanted: str) -> None:
    """One that decodes, takes its KV and pairs with it."""
    partners = [worker(name, role, pairs_with=pair, capabilities=can) for name, role, pair, can in others]
    facts = pool(worker("p", "prefill", pairs_with="a", capabilities=HANDOFF), *partners)
    texts = [one.text for one in diagnose(facts) if one.about == "p"]
    assert texts == [] if not wanted else wanted in texts[0]


def test_a_role_needs_an_engine_that_hands_over() -> None:
    """Whatever partners there are."""
    facts = pool(
        worker("p", "prefill", pairs_with="a", capabilities=("generate",)),
        worker("d", "decode", pairs_with="a", capabilities=HANDOFF),
    )
    assert "no connector" in next(one.text for one in diagnose(facts) if one.about == "p")


def test_ports_matter_only_where_nothing_of_the_fleet_runs() -> None:
    """A port of 127.0.0.1 is not one of another address; one of all addresses is."""
    machine = MachineFacts(
        "here",
        listeners=(Listener("10.0.0.1", 8000, 7, "nginx"), Listener("0.0.0.0", 4222, 0, "")),
        wanted_ports=(WantedPort("--port", "127.0.0.1", 8000), WantedPort("--nats-port", "127.0.0.1", 4222)),
    )
    down = NOTHING._replace(machine=machine, unreachable=Unreachable("no answer", denied=False))
    found = {one.about: one.text for one in diagnose(down) if one.id == "port-taken"}
    assert found == {"--nats-port 4222": "a process of another user listens there"}
    assert "port-taken" not in ids(HEALTHY._replace(machine=machine))
    # The server that answers is the one that listens.
    assert ids(NOTHING._replace(machine=machine)) == []


def test_a_fleet_on_another_port_is_named() -> None:
    """Only where no URL was given: who gives one means it."""
    machine = MachineFacts("here", fleet=LocalFleet("data", 7, 4333, 0))
    asked = HEALTHY._replace(machine=machine, given_url=False)
    assert the(asked).remedy == "give --nats nats://127.0.0.1:4333"
    assert ids(asked._replace(given_url=True)) == []
    assert ids(asked._replace(url="nats://127.0.0.1:4333")) == []


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        ({"lag_messages": 10, "lag_s": 4.0}, []),
        ({"lag_messages": 0, "lag_s": 600.0}, []),
        ({"lag_messages": 10, "lag_s": 6.0}, ["router-behind"]),
        ({"diverged": {"other": 9}}, ["routers-differ"]),
        ({"diverged": {}}, []),
    ],
)
def test_routers(data: dict[str, Any], wanted: list[str]) -> None:
    """An idle log has an old newest message, and nothing that is unread."""
    assert ids(HEALTHY._replace(processes=(ProcessFacts("router", "r", "1.0", data),))) == wanted


def test_vulnerabilities_that_an_edge_keeps_away_are_notes() -> None:
    """Those that start refuses are errors."""
    for version, wanted in (("0.24.0", []), ("0.14.0", ["note"]), ("0.8.0", ["error", "note"]), ("", [])):
        data = {"engine": "vllm", "engine_version": version}
        found = diagnose(HEALTHY._replace(processes=(ProcessFacts("worker", "w", "1.0", data),)))
        assert [one.severity for one in found] == wanted, version


def test_keys_that_may_not_be_read_are_no_finding() -> None:
    """None are there only where the table says so."""
    edge = ProcessFacts("edge", "e", "1.0", {"auth": "keys,oidc"})
    assert ids(HEALTHY._replace(processes=(edge,), keys=0)) == ["no-api-key"]
    assert ids(HEALTHY._replace(processes=(edge,), keys=None)) == []
    assert ids(HEALTHY._replace(processes=(edge._replace(data={"auth": "oidc"}),), keys=0)) == []


def test_files_are_compared_with_those_of_edges() -> None:
    """What one side does not say is not compared."""

    def facts(own: dict[str, str], used: dict[str, str]) -> Facts:
        return HEALTHY._replace(
            processes=(
                ProcessFacts("edge", "e", "1.0", {"files": {"p": used}}),
                ProcessFacts("worker", "w", "1.0", {"pool": "p", "model": "m", **own}),
            )
        )

    same = {"tokenizer": "a", "chat_template": "b"}
    assert ids(facts(same, same)) == []
    assert ids(facts(same, {**same, "chat_template": "c"})) == ["template-differs"]
    assert ids(facts(same, {**same, "tokenizer": "c"})) == ["tokenizer-differs"]
    assert ids(facts({}, same)) == []
    assert ids(facts(same, {"tokenizer": "a", "chat_template": ""})) == []


def test_what_the_history_finds_keeps_its_words() -> None:
    """Its remedy and its severity; of a pool that has no worker nothing more is said."""
    one = HistoryFinding("info", "w is draining", "takes none", "resume it", worker="w")
    found = the(pool(worker(), history=(one,)))
    assert (found.severity, found.about, found.remedy) == ("note", "w", "resume it")
    gone = pool(worker(), history=(one,))._replace(leases=LEASES[:2])
    assert ids(gone) == ["no-worker"]


def test_the_worst_comes_first_and_each_remedy_once() -> None:
    """And what was not looked for last."""
    facts = NOTHING._replace(
        leases=(),
        machine=MachineFacts(open_key_files=("b.nk", "a.nk")),
        skipped=(Skipped(("kv-lost",), "of this"),),
    )
    assert ids(facts) == ["nothing-runs", "key-file-readable", "key-file-readable"]
    text = as_text(facts, diagnose(facts))
    assert text.count("remedy of key-file-readable") == 1
    assert text.endswith(
        f"3 findings; {len(KINDS) - 1} of {len(KINDS)} kinds were looked for\n  not looked for: kv-lost: of this"
    )
