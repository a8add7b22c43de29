"""Whether images are encoded apart: from what the log says that each way takes."""

import msgspec
import numpy as np
import pytest

from headwater.router.context import DecisionContext
from headwater.router.decide import Prompt, decide, recompute
from headwater.router.encode_leg import (
    MEASURED_FACTOR,
    WAIT_S_MAX,
    WAIT_S_MIN,
    WAIT_S_UNKNOWN,
    weigh_encoding,
)
from headwater.router.index.prefix_index import PrefixIndex
from headwater.router.load import Loads
from headwater.schemas.events import LoadReported, WorkerJoined
from headwater.schemas.routing import (
    NO_CONSTRAINTS,
    NO_PREFERENCES,
    Candidate,
    Constraints,
    Decision,
    EncodeEstimate,
    RouteQuery,
    Weights,
)

SIZE = 16
QUIET = Weights(arrivals=0.0)
CONTEXT = DecisionContext(1, 0, 0, 1_000_000_000, Weights(), degraded=False)


def decision(worker: str, requests: int = 0, estimate: EncodeEstimate | None = None) -> Decision:
    """The choice of a worker."""
    chosen = Candidate(worker, 5, 0, 0, 0, 0, requests, 0.0)
    made = Decision(
        1, 1, 0, 0, "r", 100, 1, 6, 0, 0, 0, NO_CONSTRAINTS, NO_PREFERENCES, QUIET, 0, worker, 5, (chosen,)
    )
    return msgspec.structs.replace(made, encoding=estimate)


def way(queue: float = 0, encode: float = 20, read: float = 2, here: float = 20) -> EncodeEstimate:
    """Of an image with 40 tokens."""
    return EncodeEstimate("w", queue, encode, encode / 40, read, here)


@pytest.mark.parametrize(
    ("estimate", "requests", "apart"),
    [
        (way(), 0, False),  # an idle serving worker: reading is all that is added
        (way(), 1, True),  # 22 ms against 30
        (way(queue=7), 1, True),
        (way(queue=9), 1, False),
        (way(read=45), 4, False),  # an idle encode worker, but 65 ms against 60
        (way(encode=5), 0, True),  # a faster encoder
        (way(encode=0, read=19), 0, True),  # its embedding is there
    ],
)
def test_the_leg_is_taken_where_it_is_expected_to_be_cheaper(
    estimate: EncodeEstimate, requests: int, apart: bool
) -> None:
    """Queue, encoding and hand-off against encoding here, which delays those that run."""
    found = weigh_encoding("r-0-1", [40], [decision("e", estimate=estimate)], decision("w", requests))
    assert found.is_apart == apart
    assert found.apart_ms == estimate.queue_ms + estimate.encode_ms + estimate.read_ms
    assert found.here_ms == 20 * (1 + requests / 2)


def test_an_image_may_wait_for_what_it_saves() -> None:
    """The encode worker has the last word on what is ahead of it: in tokens, at its pace."""
    found = weigh_encoding("r-0-1", [40], [decision("e", estimate=way())], decision("w", 4))
    assert found.ahead_max == (int((60 - 2 - 20) / 0.5),)
    held = weigh_encoding("r-0-1", [40], [decision("e", estimate=way(encode=0))], decision("w", 4))
    assert held.ahead_max == (0,), "nothing is ahead of it"


def test_requests_that_come_later_wait_for_an_image_too() -> None:
    """As for a prompt: the longer, the more work the worker has."""
    busy = decision("w")
    [chosen] = busy.candidates
    serving = msgspec.structs.replace(
        busy, weights=Weights(arrivals=5.0), candidates=(msgspec.structs.replace(chosen, queue_ms=90.0),)
    )
    found = weigh_encoding("r-0-1", [40], [decision("e", estimate=way())], serving)
    assert found.here_ms == pytest.approx(20 + 5 / 1000 * (2 * 90 + 20) * 20 / 2)
    assert found.is_apart


def test_images_of_a_request_are_compared_together() -> None:
    """Here one after the other; apart at the same time, and each is read."""
    answers = [decision("e", estimate=way()), decision("f", estimate=way(queue=5))]
    found = weigh_encoding("r-0-1", [40, 40], answers, decision("w"))
    assert (found.apart_ms, found.here_ms) == (25 + 4, 40)
    assert found.ahead_max == (int((40 - 4 - 20) / 0.5),) * 2


@pytest.mark.parametrize(("requests", "ahead"), [(0, 0), (4, 80), (8, 160)])
def test_without_measurements_both_encode_at_the_same_pace(requests: int, ahead: int) -> None:
    """In tokens; images of one request may be ahead of each other."""
    serving = decision("w", requests)
    for estimate in (None, EncodeEstimate("w")):
        found = weigh_encoding("r", [40], [decision("e", estimate=estimate)], serving)
        assert found == (0.0, 0.0, (ahead,), WAIT_S_UNKNOWN)
    two = weigh_encoding("r", [40, 10], [], serving)
    assert two.ahead_max == (10 + ahead * 50 // 40, 40 + ahead * 50 // 40)


def test_an_embedding_is_awaited_for_a_multiple_of_its_estimate() -> None:
    """Between bounds."""
    waits = [
        weigh_encoding("r", [40], [decision("e", estimate=way(queue=queue, here=1e6))], decision("w")).wait_s
        for queue in (0, 978, 1e5)
    ]
    assert waits == [WAIT_S_MIN, 3.0, WAIT_S_MAX]


def test_a_few_requests_take_the_other_way() -> None:
    """So that both stay measured; not where it would cost much more."""
    names = [f"r{number}-0-1" for number in range(2_000)]

    def share(estimate: EncodeEstimate) -> float:
        answers = [decision("e", estimate=estimate)]
        return sum(weigh_encoding(name, [40], answers, decision("w")).is_apart for name in names) / len(names)

    assert 0.005 < share(way(read=10)) < 0.03
    assert 0.97 < share(way(encode=10)) < 0.995
    assert share(way(read=20 * MEASURED_FACTOR)) == 0
    assert share(way(here=22 * MEASURED_FACTOR + 1)) == 1


def fleet() -> Loads:
    """A worker that serves and one that encodes, of one engine, and one that encodes of another."""
    loads = Loads()
    for name, engine, role, capabilities in (
        ("w", "sim", "both", ("generate", "kv_events")),
        ("e", "sim", "encode", ("encode", "kv_events")),
    ):
        loads.join(
            WorkerJoined(name, 5, "m", engine, role, SIZE, 1_000, 8, capabilities=capabilities)  # type: ignore[arg-type]
        )
    return loads


def routed(loads: Loads, image: int = 1, reader: str = "w") -> Decision:
    """Of an image with 160 tokens."""
    tokens = 160
    blocks = np.arange(1_000 * image, 1_000 * image + tokens // SIZE, dtype=np.uint64)
    prompt = Prompt(len(blocks), blocks, int(blocks[-1]))
    query = RouteQuery("r-0-1-e0-0", tokens, 0, b"", Constraints(needs=("encode",)), reader=reader)
    found = decide(PrefixIndex(), loads, set(), prompt, query, CONTEXT)
    assert isinstance(found, Decision)
    again = recompute(PrefixIndex(), loads, set(), found)
    assert again == found
    return found


def test_times_are_learned_from_load_reports_and_recorded() -> None:
    """Of an encode worker what it computed, of others what prompts with images took longer, and what reading took."""
    loads = fleet()
    assert routed(loads).encoding == EncodeEstimate("w")
    assert routed(loads, reader="").encoding is None
    loads.report("e", 5, LoadReported(0, 0, 0, 1_000, prefills=((160, 1_000),)))
    assert routed(loads).encoding == EncodeEstimate("w"), "what reading takes is not known yet"
    loads = fleet()
    steps = [(tokens, tokens * 10) for tokens in (100, 200, 400, 800)] * 8
    loads.report("w", 5, LoadReported(0, 0, 0, 1_000, prefills=tuple(steps)))
    loads.report("w", 5, LoadReported(0, 0, 0, 1_000, reads=((160, 3_000),) * 7))
    assert routed(loads).encoding == EncodeEstimate("w")
    loads.report("w", 5, LoadReported(0, 0, 0, 1_000, reads=((160, 3_000),)))
    # 200 tokens of prompt take 2 ms, so each of the two images 9 ms.
    encoded = LoadReported(0, 0, 0, 1_000, encodes=((200, 2, 320, 20_000),))
    loads.report("w", 5, encoded)
    found = routed(loads).encoding
    assert found is not None
    assert found.here_ms == pytest.approx(9, rel=0.01)
    assert found.encode_ms == found.here_ms, "not measured there"
    assert (found.read_ms, found.queue_ms) == (3, 0)
    loads.report("e", 5, LoadReported(0, 0, 0, 1_000, prefills=((160, 4_000),)))
    loads.decide(msgspec.structs.replace(routed(loads), request="other"))
    found = routed(loads).encoding
    assert found is not None
    assert (found.encode_ms, found.token_ms) == (0, 4 / 160), "it is being computed for another request"
    assert found.queue_ms == pytest.approx(4)
    found = routed(loads, image=2).encoding
    assert found is not None
    assert found.encode_ms == 4
    assert found.queue_ms == pytest.approx(4)
