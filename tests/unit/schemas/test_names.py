"""Names and subjects: nothing that a name holds can change which subject is meant."""

import re
from collections.abc import Callable
from itertools import product
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.schemas import subjects
from headwater.schemas.names import (
    NO_TRACE,
    SECOND_NS,
    InvalidName,
    TraceContext,
    pool_name,
    request_of,
    slug,
    span_id,
    time_of,
    token,
    unique_ids,
)
from headwater.schemas.subjects import EngineVerb, PoolKind
from tests.support.worlds.clock import WALL_NS, ManualClock

VALID = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
names = st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)

BUILDERS: tuple[Callable[[str], str], ...] = (
    lambda name: subjects.pool_stream(name, "p"),
    lambda name: subjects.pool_stream("ns", name),
    lambda name: subjects.pool_filter(name, "p"),
    lambda name: subjects.pool_filter("ns", name),
    lambda name: subjects.pool_subject("ns", "p", "kv", name),
    lambda name: subjects.pool_subject("ns", name, "kv", "w"),
    lambda name: subjects.request_stream(name),
    lambda name: subjects.request_filter(name),
    lambda name: subjects.request_subject("ns", name),
    lambda name: subjects.route_query("ns", name),
    lambda name: subjects.route_wait("ns", name, "r", 1),
    lambda name: subjects.route_wait("ns", "p", name, 1),
    lambda name: subjects.engine("ns", name, 1, "generate"),
    lambda name: subjects.edge_frames("ns", name),
    lambda name: subjects.lease_bucket(name),
    lambda name: subjects.lease_key("worker", name),
    lambda name: subjects.card_bucket(name),
    lambda name: subjects.card_key(name),
    lambda name: subjects.blob_bucket(name),
    lambda name: subjects.snapshot_prefix(name),
    lambda name: subjects.snapshot_name(name, 1),
    lambda name: subjects.snapshot_chunk_prefix(name),
    lambda name: subjects.snapshot_chunk(name, 1, "w", 1),
    lambda name: subjects.snapshot_chunk("p", 1, name, 1),
    lambda name: subjects.bookmark_prefix(name),
    lambda name: subjects.bookmark_name(name, "b"),
    lambda name: subjects.bookmark_name("p", name),
)


@given(st.text(max_size=70))
def test_a_name_is_one_subject_token_or_refused(text: str) -> None:
    """Dots, wildcards, blanks, line ends and anything exotic raise InvalidName with kind and name."""
    if VALID.fullmatch(text):
        assert token("worker", text) == text
    else:
        with pytest.raises(InvalidName, match="worker"):
            token("worker", text)


@pytest.mark.parametrize(
    "name", ["", ".", "a.b", "*", ">", "a b", "a\n", "w\u00e9", "a" * 65, "\u0661", "$SRV"]
)
def test_every_subject_refuses_what_is_no_token(name: str) -> None:
    """No builder lets a bad name through, wherever in the subject it stands."""
    for build in BUILDERS:
        with pytest.raises(InvalidName):
            build(name)


@given(names, names)
def test_different_names_never_share_a_subject(one: str, other: str) -> None:
    """A subject, stream, bucket or key belongs to one name."""
    for build in BUILDERS:
        assert (build(one) == build(other)) == (one == other)
        assert not set(build(one)) & set("* \t\n")


def test_a_pool_subject_tells_its_kind_and_lies_under_its_pool() -> None:
    """Reader and writer agree on the spelling; kinds and writers do not mix."""
    kinds: tuple[PoolKind, ...] = get_args(PoolKind)
    assert kinds == subjects.POOL_KINDS
    prefix = subjects.pool_filter("ns", "p").removesuffix(">")
    made = {subjects.pool_subject("ns", "p", kind, writer): kind for kind, writer in product(kinds, "ab")}
    assert len(made) == 2 * len(kinds)
    for subject, kind in made.items():
        assert subjects.pool_kind(subject) == kind
        assert subject.startswith(prefix)
        assert subject.count(".") == 5


def test_each_life_of_a_worker_has_its_own_subjects() -> None:
    """What is meant for one epoch can not reach another, and verbs do not mix."""
    verbs: tuple[EngineVerb, ...] = get_args(EngineVerb)
    made = {subjects.engine("ns", "w", epoch, verb) for epoch in (1, 2, 11) for verb in verbs}
    assert len(made) == 3 * len(verbs)
    assert "hw.ns.engine.w.2.generate" in made


def test_snapshots_sort_by_position() -> None:
    """The newest snapshot is the last name."""
    positions = [0, 1, 9, 10, 99, 12_345_678_901, 2**63 - 1]
    made = [subjects.snapshot_name("p", position) for position in positions]
    assert made == sorted(made)
    assert [int(name.rsplit("/", 1)[1]) for name in made] == positions
    assert all(name.startswith(subjects.snapshot_prefix("p")) for name in made)


def test_service_subjects_are_those_that_the_stock_tool_asks() -> None:
    """The protocol spells them $SRV.<verb>[.<name>[.<id>]]."""
    assert subjects.service("PING") == "$SRV.PING"
    assert subjects.service("INFO", "headwater-router") == "$SRV.INFO.headwater-router"
    assert subjects.service("STATS", "headwater-router", "r1") == "$SRV.STATS.headwater-router.r1"


@given(st.text(max_size=100), st.integers(1, 65_536))
def test_any_text_can_be_made_a_name(text: str, block_size: int) -> None:
    """Model paths and host names of whatever spelling give valid tokens, always the same."""
    assert VALID.fullmatch(slug(text))
    assert slug(slug(text)) == slug(text)
    assert VALID.fullmatch(pool_name(text, block_size))
    assert pool_name(text, block_size).endswith(f"-b{block_size}")


def test_a_pool_is_one_model_and_one_block_size() -> None:
    """Blocks of another size are not interchangeable, so they are another pool."""
    assert re.fullmatch(r"meta-llama-llama-3-1-8b-[0-9a-f]{8}-b16", pool_name("meta-llama/Llama-3.1-8B", 16))
    assert pool_name("m", 16) != pool_name("m", 32)
    assert pool_name("a", 16) != pool_name("b", 16)


@pytest.mark.parametrize("name", ["sim", "m", "smollm2-135m-instruct", "qwen_3-8b", "7b", "a" * 47])
def test_a_name_that_is_a_token_already_is_its_pools_name(name: str) -> None:
    """Nothing is added to it: people type it."""
    assert pool_name(name, 16) == f"{name}-b16"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("acme/sim.v1", "Acme-Sim-v1"),
        ("acme/sim.v1", "acme-sim-v1"),
        ("Sim", "sim"),
        ("sim", " sim"),
        ("sim", "-sim-"),
        ("sim-", "sim"),
        ("", "unnamed"),
        ("模型一", "模型二"),
        ("a..b", "a.b"),
        ("x" * 56 + "-instruct", "x" * 56 + "-base"),
        ("x" * 47, "x" * 48),
        ("x" * 63, "x" * 64),
    ],
)
def test_two_models_never_share_a_pool(one: str, other: str) -> None:
    """Even if their names differ only in what no token may have, or only at their ends."""
    assert pool_name(one, 16) != pool_name(other, 16)
    for name in (one, other):
        assert VALID.fullmatch(pool_name(name, 65_536))


@given(st.text("aA-_./ é", max_size=8), st.text("aA-_./ é", max_size=8))
def test_pool_names_are_unique(one: str, other: str) -> None:
    """Names that are spelled alike are where two could become one."""
    assert (pool_name(one, 16) == pool_name(other, 16)) == (one == other)


def test_no_name_is_spelled_like_the_pool_of_another() -> None:
    """A model may be called as another one's pool is, but for the block size."""
    for name in ("acme/sim.v1", "x" * 80, "", "sim"):
        pool = pool_name(name, 16)
        assert pool_name(pool.removesuffix("-b16"), 16) != pool or name == "sim"
        assert pool_name(pool, 16) != pool


# Request ids: unique over processes, and with the time at which they were made.


NOW_S = WALL_NS // SECOND_NS


def test_ids_have_24_hex_digits_and_begin_with_the_time() -> None:
    """To the second, also after the clock moved, forward and back."""
    clock = ManualClock()
    make = unique_ids(clock.wall_ns)
    for second in (0.0, 0.9, 1.0, 3600.0, 7.0):
        clock.now_s = second
        name = make()
        assert len(name) == 24
        assert int(name[:8], 16) == NOW_S + int(second)
        assert time_of(name, clock.wall_ns()) == (NOW_S + int(second)) * SECOND_NS


def test_ids_are_unique_within_and_across_processes() -> None:
    """Also in the same second, and when the clock goes back."""
    clock = ManualClock()
    makers = [unique_ids(clock.wall_ns) for _ in range(20)]
    names = [make() for make in makers for _ in range(500)]
    clock.now_s = -5.0
    names += [make() for make in makers for _ in range(500)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["chatcmpl-{}", "msg_{}", "resp_{}", "chatcmpl-{}-0-1", "img-{}", "{}"])
def test_the_time_is_read_from_every_form_of_name(name: str) -> None:
    """With the prefix of its API, and with the choice and attempt of a decision behind it."""
    made = unique_ids(ManualClock().wall_ns)()
    assert time_of(name.format(made), WALL_NS) == WALL_NS


@pytest.mark.parametrize(
    "name",
    [
        "",
        "chatcmpl-1-0-1",
        "chatcmpl-w3-17",
        f"{NOW_S:08x}" + "0" * 15,
        f"{NOW_S:08x}" + "0" * 17,
        f"{NOW_S:08X}" + "0" * 16,
        f"{NOW_S + 90_000:08x}" + "0" * 16,
        "00000001" + "0" * 16,
        "ba2352da5871234b1c38bb0a",
    ],
)
def test_other_names_have_no_time(name: str) -> None:
    """Ids of another form, and times before the first release or in the future."""
    assert time_of(name, WALL_NS) is None


@pytest.mark.parametrize("name", ["chatcmpl-{}", "msg_{}", "{}", "audio-1-{}"])
@pytest.mark.parametrize("after", ["", "-0-1", "-12-3", "-0-1-e2-1"])
def test_an_attempt_names_its_request(name: str, after: str) -> None:
    """A leg of it, or the encode leg of one of its images."""
    request = name.format(unique_ids(ManualClock().wall_ns)())
    assert request_of(f"{request}{after}") == request


# Trace contexts and ids: the same ones whoever computes them, and shares of traces as OpenTelemetry's own sampler has them.


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SENT = TraceContext(TRACE, "00f067aa0ba902b7", True, "vendor=1")
NAMES = [f"chatcmpl-{number:024x}" for number in range(2_000)]


def test_ids_are_functions_of_names() -> None:
    """Pinned: a worker of another release must find the span that a leg's engine joins."""
    assert SENT.trace_of("r") == TRACE
    assert NO_TRACE.trace_of("chatcmpl-1") == "859cb54fff01853ebe5290c3db17ced7"
    assert span_id(TRACE, "chatcmpl-1") == "e4d6944e7b98c80d"
    assert span_id(TRACE, "chatcmpl-1", "chatcmpl-1-0-1") == "1f2249773d948ff0"
    assert len({span_id(TRACE, name, leg) for name in NAMES for leg in ("a", "b")}) == 2 * len(NAMES)


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_a_share_of_traces_is_recorded_as_opentelemetry_would(ratio: float) -> None:
    """By the trace id alone, so every process decides alike; and everything in a smaller share is in the greater one."""
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    sampler = TraceIdRatioBased(ratio)
    taken = [name for name in NAMES if NO_TRACE.is_sampled(name, ratio)]
    assert taken == [
        name
        for name in NAMES
        if sampler.should_sample(None, int(NO_TRACE.trace_of(name), 16), "").decision
        is Decision.RECORD_AND_SAMPLE
    ]
    assert abs(len(taken) - ratio * len(NAMES)) < 0.03 * len(NAMES)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_client_decides_for_its_own_trace(sampled: bool) -> None:
    """Whatever share is recorded of those without a client's trace."""
    context = TraceContext(TRACE, SENT.span, sampled)
    assert [context.is_sampled("r", ratio) for ratio in (0.0, 1.0)] == [sampled, sampled]


def test_an_engine_is_told_the_span_of_its_leg() -> None:
    """And whether to record it, so that it records nothing of traces that nobody does."""
    span = span_id(TRACE, "r", "r-0-1")
    assert SENT.headers_below("r", "r-0-1", 0.0) == {
        "traceparent": f"00-{TRACE}-{span}-01",
        "tracestate": "vendor=1",
    }
    trace = NO_TRACE.trace_of("r")
    own = f"00-{trace}-{span_id(trace, 'r', 'r-0-1')}"
    assert NO_TRACE.headers_below("r", "r-0-1", 0.0) == {"traceparent": f"{own}-00"}
    assert NO_TRACE.headers_below("r", "r-0-1", 1.0) == {"traceparent": f"{own}-01"}
