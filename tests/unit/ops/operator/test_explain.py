"""What `headwater explain` prints of a decision: every number a person needs to agree or to disagree."""

import msgspec

from headwater.ops.history.explanation import afterwards, describe, event_line
from headwater.router.encode_leg import ANY_AHEAD
from headwater.schemas.events import LoadReported, MediaPlace, RequestAccepted, RequestEncoded
from headwater.schemas.routing import Candidate, Constraints, Decision, Draw, Preferences, Shadowed, Weights
from tests.support.data.queries import changed

TIMED = (
    Candidate("w1", 1, 40, 0, 0, 80, 2, 90.0, assumed_blocks=8, queue_ms=0.0, prefill_ms=20.0),
    Candidate("w2", 1, 0, 4, 900, 10, 1, 150.0, queue_ms=30.0, prefill_ms=50.0),
)
DECISION = Decision(
    number=5,
    position=40,
    seen=3,
    wall_ns=1,
    request="chatcmpl-1-0-1",
    prompt_tokens=1_000,
    max_tokens=20,
    blocks=62,
    deepest=11,
    following=12,
    last=13,
    constraints=Constraints(),
    preferences=Preferences("kv", 0.0),
    weights=Weights(),
    seed=99,
    worker="w1",
    epoch=1,
    candidates=TIMED,
    waited_ms=12,
)


def told(**changes: object) -> str:
    """The explanation of the decision with something changed."""
    return describe(changed(DECISION, **changes), 42)


def test_times_are_shown_where_they_were_known() -> None:
    """Queue, prefill, what others lose, and the rest add up to the cost."""
    lines = told().splitlines()
    assert "decided at log position 40, stored at 42, after 12 ms in the queue" in lines[0]
    w1 = next(line for line in lines if line.lstrip("-> ").startswith("w1"))
    # Crowding 0.1 for two requests, a fifth of 20 ms; and 5 requests a second that wait 10 ms on average for 20 ms; 90 - 20 - 5 is left.
    assert w1.split()[-5:] == ["0.0", "20.0", "5.0", "65.0", "90.00"]
    assert "40 of 62" in w1
    assert "of those assumed" in lines[1]
    assert lines[-1] == "w1: least cost, 90.00 ms"


def test_without_times_costs_are_in_blocks() -> None:
    """As before the router has learned how long prompts take."""
    bare = tuple(msgspec.structs.replace(one, queue_ms=0.0, prefill_ms=0.0) for one in TIMED)
    text = told(candidates=bare)
    assert "prefill ms" not in text
    assert text.endswith("w1: least cost, 90.00 blocks")


def test_decoding_is_shown_where_it_was_known() -> None:
    """Between two tokens, and to the last of those expected; "-" for a worker that has generated nothing."""
    assert "ITL ms" not in told()
    some = (msgspec.structs.replace(TIMED[0], itl_ms=12.5), TIMED[1])
    lines = told(candidates=some, output_tokens=17).splitlines()
    assert lines[1].split("  ")[-3:] == ["ITL ms", "E2E ms", "cost ms"]
    # 20 ms to the first token, and 16 gaps.
    assert lines[3].split()[-3:] == ["12.5", "220.0", "90.00"]
    assert lines[4].split()[-3:] == ["-", "-", "150.00"]
    assert lines[5] == "E2E: of 17 output tokens, at most 20"
    spread = told(candidates=some, output_tokens=17, output_deviation=4)
    assert "E2E: of 17 output tokens (standard deviation 4), at most 20" in spread


def test_the_reason_is_the_one_that_counted() -> None:
    """A pin, another policy, chance, a tie, or a prompt too short to hand over."""
    assert told(pinned="w1").endswith("the request was for this worker only")
    assert told(policy="round_robin", worker="w2").endswith("its cost is 60.00 above the least")
    assert "drawn at temperature 0.5" in told(temperature=0.5, worker="w2")
    tie = tuple(msgspec.structs.replace(one, score=90.0) for one in TIMED)
    assert told(candidates=tie).endswith("(drawn among 2 equal)")
    assert "not handed over" in told(worker="w2")


def test_of_a_large_fleet_the_number_of_candidates_is_told() -> None:
    """Its record keeps a few; the others are recomputed on demand."""
    assert "more of" not in told()
    assert "and 1,022 more of 1,024 candidates: --all shows them" in told(scored=1_024)


def test_what_the_log_knew_later_is_told() -> None:
    """Cached tokens as the engine found them, and what a shadow would have done."""
    report = LoadReported(1, 0, 0, 9, prefilled=("other", DECISION.request), cached=(3, 512))
    assert afterwards(DECISION, report) == ["the engine found 512 prompt tokens cached"]
    assert afterwards(DECISION, LoadReported(1, 0, 0, 9, prefilled=(DECISION.request,))) == []
    shadow = Shadowed(DECISION.request, "random", "w2", "w1", "kv", 150.0, 90.0, 90.0)
    assert afterwards(DECISION, shadow) == [
        "policy random would have taken w2; by kv the choice cost 0.00 too much"
    ]
    assert "later: so" in describe(DECISION, 42, ["so"])


ENGINES = {"w1": "vllm", "w2": "sglang"}
WEIGHTS = (("sglang", 1.0), ("vllm", 0.0))


def test_engines_are_shown_where_they_differ_with_the_draw_between_them() -> None:
    """The weights, what the draw came from, and the cost among the workers of that engine only."""
    assert "engine" not in describe(DECISION, 42, engines={"w1": "sim", "w2": "sim"})
    drawn = changed(DECISION, worker="w2", draw=Draw(WEIGHTS, "sglang", "sglang"))
    lines = describe(drawn, 42, engines=ENGINES).splitlines()
    assert lines[1].split()[:2] == ["worker", "engine"]
    assert next(line for line in lines if "w2" in line).split()[:3] == ["->", "w2", "sglang"]
    assert lines[-2] == "engine sglang: drawn by weights sglang=1 vllm=0, seed 99"
    assert lines[-1] == "w2: least cost, 150.00 ms"


def test_an_engine_that_replaced_the_drawn_one_has_its_reason() -> None:
    """And the session that the draw came from, if there was one."""
    draw = Draw(WEIGHTS, "sglang", "vllm", "no worker of sglang is in the pool")
    text = describe(changed(DECISION, draw=draw, session="a"), 42, engines=ENGINES)
    assert (
        "engine vllm in place of sglang, drawn by weights sglang=1 vllm=0, session a: "
        "no worker of sglang is in the pool"
    ) in text


def test_media_of_a_prompt_are_shown_with_their_places() -> None:
    """Of each kind, and why no encode worker was asked."""
    image, video = MediaPlace("image", "0a", 3, 56), MediaPlace("video", "0b", 60, 8)
    audio = MediaPlace("audio", "0c", 70, 4)
    bare = RequestAccepted("r", "m", "chat", 100, 20, True)
    assert (
        event_line(bare)
        == "req.accepted: model m, endpoint chat, prompt 100 tokens, max 20 tokens, stream True, choices 1"
    )
    images = event_line(msgspec.structs.replace(bare, media=(image,)))
    assert images == f"{event_line(bare)}; image 0a (56 tokens from 3 on)"
    videos = event_line(msgspec.structs.replace(bare, media=(image, video)))
    assert videos == f"{event_line(bare)}; image 0a (56 tokens from 3 on), video 0b (8 tokens from 60 on)"
    for media in ((image, video, audio), (video, audio)):
        line = event_line(msgspec.structs.replace(bare, media=media))
        assert line.endswith("video 0b (8 tokens from 60 on), audio 0c (4 tokens from 70 on)")


def test_an_encode_leg_is_shown_with_the_estimate_that_decided_on_it() -> None:
    """Or without, where the edge makes none."""
    event = RequestEncoded(
        "r", 0, "r-0-1", "0a", 56, "computed", "encode-0", 3, 12.5, "", 700, apart_ms=20.1, here_ms=30.2
    )
    assert event_line(event) == (
        "req.encoded: 0a, 56 tokens: computed by encode-0.3, after 12.5 ms; choice 0, attempt r-0-1; "
        "expected: 20.1 ms apart, 30.2 ms on the serving worker with the delay of others; "
        "the serving worker was expected to be faster with more than 700 tokens of other items ahead of it"
    )
    always = event_line(msgspec.structs.replace(event, ahead_max=ANY_AHEAD, apart_ms=0.0, here_ms=0.0))
    assert always.endswith("attempt r-0-1; the edge always uses encode workers (--encode-legs)")
