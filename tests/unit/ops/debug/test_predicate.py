"""Conditions: what they mean, what they depend on, and which are refused, with which word."""

import pytest

from headwater.ops.config.setting import ConfigError
from headwater.ops.debug.predicate import COUNTED, INDEX, NUMERIC, SUMMED, WORKER, Totals, parse
from headwater.router.state import RouterState
from headwater.schemas.events import BlocksStored, LoadReported, WorkerChanged, WorkerDraining
from tests.docs.pages import ROOT
from tests.support.data.examples import joined, packed, record


def a_state() -> RouterState:
    """Three workers: w1 busy with an adapter and 2 blocks, w2 draining, w3 idle."""
    state = RouterState()
    for worker in ("w1", "w2", "w3"):
        state.apply(record(1, joined(worker), writer=worker))
    state.apply(record(2, WorkerChanged("w1", 1, "ready", "decode", ("a", "b"), ("batch",)), writer="w1"))
    state.apply(record(3, LoadReported(5, 7, 250, 1000), writer="w1"))
    state.apply(record(4, LoadReported(1, 0, 10, 1000), writer="w2"))
    state.apply(record(5, BlocksStored(0, packed(1, 2)), writer="w1"))
    state.apply(record(6, WorkerDraining("w2", 1), writer="w2"))
    return state


def holds(text: str) -> bool:
    """Does it hold on that state?"""
    found, state = parse(text), a_state()
    totals = Totals(state, found.sums, found.extremes)
    return found.holds(tuple(term.read(state, totals) for term in found.terms))


@pytest.mark.parametrize(
    "text",
    [
        'worker("w1").running == 5',
        "worker('w1').waiting > 6 and worker('w1').waiting < 8",
        '6 < worker("w1").waiting <= 7 < 8',
        'worker("w1").kv_used == 0.25',
        'worker("w1").cached_blocks == 2',
        'worker("w2").state == "draining"',
        'worker("w1").state != "draining"',
        'worker("w1").role in ("prefill", "decode")',
        'worker("w3").role not in ["prefill", "decode"]',
        '"a" in worker("w1").adapters and "c" not in worker("w1").adapters',
        '"batch" in worker("w1").taints',
        'worker("w1").present and not worker("w9").present',
        'worker("w9").state == "absent"',
        'not worker("w1").cold',
        'not (worker("w9").running < 100) and not (worker("w9").running >= 100)',
        'worker("w9").running + 1 > 0 or worker("w1").present',
        "workers.total == 3 and workers.ready == 2 and workers.draining == 1 and workers.sleeping == 0",
        "workers.running == 6 and workers.waiting == 7 and workers.used_blocks == 260",
        'workers.max("waiting") == 7 and workers.min("waiting") == 0 and workers.max("kv_used") == 0.25',
        "workers.cached_blocks == 2 and index.blocks == 2 and index.refused == 0",
        "workers.used_blocks / workers.total_blocks < 0.1",
        "-workers.running + 2 * 3 == 0 and workers.running % 4 == 2 and workers.running - 6 == 0",
        'worker("w1").running / worker("w1").waiting > 0.7',
        "not (workers.running / workers.sleeping > 0 or workers.running / workers.sleeping <= 0)",
        'workers.ready < 2 or worker("w1").engine == "sim"',
    ],
)
def test_what_holds(text: str) -> None:
    assert holds(text)
    assert not holds(f"not ({text})")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (
            'worker("w1").cached_block < 9',
            "worker('w1').cached_block is not known: did you mean cached_blocks?",
        ),
        ('worker("w1").x < 9', "worker('w1').x is not known: facts of a worker are present, state, "),
        ("workers.redy < 9", "workers.redy is not known: did you mean ready?"),
        ("workers.kv_used < 1", "workers.kv_used is not known: "),
        ('workers.max("wait") < 1', "workers.max('wait') is not known: did you mean waiting?"),
        ('workers.max("state") < 1', "workers.max('state') is not known: numbers of a worker are "),
        ("index.block < 1", "index.block is not known: did you mean blocks?"),
        ("wokers.ready < 1", "wokers.ready is not known: did you mean workers?"),
        ("ready < 1", 'ready is not known: write worker("NAME").FACT, workers.FACT, '),
        ("worker(w1).waiting > 1", "worker(w1).waiting is not known: write"),
        ("workers.ready", "workers.ready is a number, not a condition: compare it, as in workers.ready < 4"),
        ('worker("w1").state', "worker('w1').state is a text, not a condition: compare it"),
        ('worker("w1").state == "drained"', "compares with what it cannot be: did you mean draining?"),
        ('worker("w1").role in ("both", "x")', "compares with what it cannot be: it is one of both, "),
        ('worker("w1").state < "b"', "orders a text: use == or !="),
        ('worker("w1").running == "5"', "compares a number with a text"),
        ("1 in workers.ready", "compares a number with a number"),
        ("workers.ready is 4", "compares with `is`: use =="),
        ('workers.ready + "a" > 1', "'a' is a text, and one can only calculate with numbers"),
        ("not workers.ready", "workers.ready is a number, not a condition"),
        ("3 < 4", "3 < 4 names no fact of the state"),
        ("workers.ready <", "this is no condition"),
        ("", "this is no condition"),
        ("workers.ready ** 9 > 1", "is not taken here"),
        ("[x for x in (1,)] == 3", "is not taken here"),
        ("(lambda: 1)() > 0", "is not known"),
        ('__import__("os").system("true") == 0', "is not known"),
        ("workers.__class__ == 1", "workers.__class__ is not known"),
        ('worker("w1").__init__ == 1', "is not known"),
        ("(" * 500 + "1", "this is no condition"),
    ],
)
def test_what_is_refused_is_named(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse(text)
    assert str(told.value).startswith("--when")
    assert wrong in str(told.value)


@pytest.mark.parametrize(
    ("text", "kinds", "workers"),
    [
        ("workers.ready < 4", {"fleet"}, None),
        ('worker("w1").state == "paused"', {"fleet"}, {"w1"}),
        ('worker("w1").waiting > worker("w2").waiting', {"fleet", "load"}, {"w1", "w2"}),
        ('worker("w1").cached_blocks < 9', {"fleet", "kv"}, {"w1"}),
        ('worker("w1").queued_tokens > 9', {"fleet", "load", "route"}, {"w1"}),
        ('worker("w1").cold', {"fleet", "load", "kv"}, {"w1"}),
        ('worker("w1").running > 1 and index.blocks > 1', {"fleet", "load", "kv"}, None),
    ],
)
def test_what_a_condition_depends_on(text: str, kinds: set[str], workers: set[str] | None) -> None:
    found = parse(text)
    assert found.kinds == kinds
    assert found.workers == workers


def test_the_guide_lists_every_fact() -> None:
    """With the words that the command has for it."""
    page = (ROOT / "docs" / "guides" / "debugging.md").read_text()
    for name, fact in WORKER.items():
        assert f"| `{name}` | {fact.about} |" in page, name
    for name in (*(f"workers.{one}" for one in ("total", *COUNTED)), *(f"index.{one}" for one in INDEX)):
        assert f"`{name}`" in page, name
    assert set(SUMMED) < set(NUMERIC)
