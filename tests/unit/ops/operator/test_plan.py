"""The plan of a roll-out: its splits from the first to the last, its rollback, and what cannot begin."""

from typing import Any

import msgspec
import pytest

from headwater.ops.config.setting import ConfigError
from headwater.ops.operator import rollout
from headwater.schemas.control import ControlReply, ShareStatus, SplitReply
from headwater.schemas.events import TrafficSplit

OK = ControlReply(200, "")


def fleet(
    *ready: tuple[str, int], split: TrafficSplit | None = None, position: int = 0, default: str = ""
) -> SplitReply:
    """What a router says of a pool with so many ready workers of each revision."""
    members = tuple(ShareStatus(name, None, max(1, count), count) for name, count in ready)
    return SplitReply(OK, position, 1, split, members, default)


def asked(to: str = "new", **fields: Any) -> rollout.Asked:
    """A roll-out in three steps."""
    return rollout.Asked("revision", to, (5.0, 50.0, 100.0), 60.0, (("errors", 1.0),), 50, "me")._replace(
        **fields
    )


def after(present: SplitReply, split: TrafficSplit) -> SplitReply:
    """The pool once a split applies."""
    return msgspec.structs.replace(present, split=split, position=present.position + 10)


def test_a_roll_out_from_its_first_step_to_its_last() -> None:
    """Without a split before, the old shares are those of the workers; at the end the old ones serve only if all others are lost."""
    first = fleet(("old", 3), ("other", 1), ("new", 1))
    split = rollout.begin(asked(), first, "id")
    assert split.shares == {"old": 95.0 * 3 / 4, "other": 95.0 / 4, "new": 5.0}
    assert (split.after, split.by) == (0, "me")
    second = rollout.promote(after(first, split), "me", "why")
    assert second.shares == {"old": 37.5, "other": 12.5, "new": 50.0}
    assert second.after == 10
    third = rollout.promote(after(after(first, split), second), "me", "why")
    assert third.shares == {"new": 100.0}
    assert third.rollout is not None
    assert third.rollout.state == "promoted"


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_rollback_restores_the_shares_of_before(steps: int) -> None:
    """From any step, and after the end; the new revision gets nothing, and a second rollback has nothing to do."""
    before = TrafficSplit("revision", {"old": 7.0, "other": 3.0}, 0)
    now = after(fleet(("old", 1), ("other", 1), ("new", 1), position=3, split=before), before)
    now = after(now, rollout.begin(asked(), now, "id"))
    for _ in range(steps):
        now = after(now, rollout.promote(now, "me", "why"))
    back = rollout.roll_back(now, "me", "slow")
    assert back.shares == {"old": 7.0, "other": 3.0, "new": 0.0}
    assert back.after == now.position
    assert back.reason == "slow"
    with pytest.raises(ConfigError, match="there is no roll-out to roll back"):
        rollout.roll_back(after(now, back), "me", "")


def test_policies_are_moved_likewise() -> None:
    """From the router's own, or from what a split before has; no worker needs to be there."""
    asks = asked("slo", subject="policy")
    split = rollout.begin(asks, fleet(default="kv"), "id")
    assert split.shares == {"kv": 95.0, "slo": 5.0}
    with pytest.raises(ConfigError, match="all requests go to kv already"):
        rollout.begin(asked("kv", subject="policy"), fleet(default="kv"), "id")


@pytest.mark.parametrize(
    ("present", "reason"),
    [
        (fleet(("old", 2)), "--to new: no worker is of this revision; the pool's revisions are: old"),
        (fleet(), "the pool's revisions are: none"),
        (fleet(("old", 2), ("new", 0)), "--to new: none of its 1 workers takes requests"),
        (fleet(("new", 2)), "all requests go to new already: there is nothing to switch"),
    ],
)
def test_what_cannot_begin(present: SplitReply, reason: str) -> None:
    """Each error says what is wrong."""
    with pytest.raises(ConfigError) as error:
        rollout.begin(asked(), present, "id")
    assert reason in str(error.value)


def test_one_roll_out_at_a_time() -> None:
    """Another one, and the removal of the split, wait for its end."""
    now = fleet(("old", 1), ("new", 1), ("newer", 1))
    now = after(now, rollout.begin(asked(), now, "id"))
    with pytest.raises(ConfigError, match="a roll-out to new is at 5 %: `headwater switch --resume`"):
        rollout.begin(asked("newer"), now, "id2")
    with pytest.raises(ConfigError, match="`headwater rollback` first"):
        rollout.remove("revision", now, "me")
    now = after(now, rollout.roll_back(now, "me", ""))
    assert rollout.remove("revision", now, "me").shares == {}
    # What was rolled back stays out.
    split = rollout.begin(asked("newer", steps=(5.0, 100.0)), now, "id2")
    assert split.shares == {"old": 95.0, "new": 0.0, "newer": 5.0}
    now = after(now, split)
    split = rollout.promote(now, "me", "")
    assert split.shares == {"newer": 100.0, "new": 0.0}
    assert rollout.begin(asked("new"), after(now, split), "id3").shares == {"newer": 95.0, "new": 5.0}


@pytest.mark.parametrize(
    ("canary", "steps", "found"),
    [
        (5.0, "", (5.0, 100.0)),
        (100.0, "", (100.0,)),
        (None, "", (5.0, 25.0, 100.0)),
        (None, "1,10.5,100", (1.0, 10.5, 100.0)),
        (None, "100", (100.0,)),
    ],
)
def test_steps(canary: float | None, steps: str, found: tuple[float, ...]) -> None:
    """In percent, up to all."""
    assert rollout.parse_steps(canary, steps) == found


@pytest.mark.parametrize(
    "steps", ["5", "100,5", "5,5,100", "0,100", "-1,100", "a,100", "5,,100", "5,nan,100"]
)
def test_steps_that_are_none(steps: str) -> None:
    """They rise up to 100."""
    with pytest.raises(ConfigError, match="write rising percentages up to 100"):
        rollout.parse_steps(None, steps)
    with pytest.raises(ConfigError, match="give one of them"):
        rollout.parse_steps(5.0, "5,100")


@pytest.mark.parametrize(
    ("text", "seconds"), [("10m", 600.0), ("90s", 90.0), ("1.5h", 5_400.0), ("7", 7.0), ("500ms", 0.5)]
)
def test_times(text: str, seconds: float) -> None:
    """With a unit, or in seconds."""
    assert rollout.parse_hold(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "10 m", "-1s", "1d"])
def test_times_that_are_none(text: str) -> None:
    """The error names the flag."""
    with pytest.raises(ConfigError, match="--hold"):
        rollout.parse_hold(text)
