"""The saga's table: every state, every cause, and that no choice can be stuck or end twice."""

from typing import get_args

import pytest

from headwater.actors.edge.saga.types import SETBACKS, TRANSITIONS, Cause, IllegalTransition, after
from headwater.schemas.events import SagaState

STATES: tuple[SagaState, ...] = get_args(SagaState)
CAUSES: tuple[Cause, ...] = get_args(Cause)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("cause", CAUSES)
def test_every_pair_is_either_in_the_table_or_a_mistake(state: SagaState, cause: Cause) -> None:
    """Nothing is guessed: what is not foreseen raises and names itself."""
    if (state, cause) in TRANSITIONS:
        assert after(state, cause) in STATES
    else:
        with pytest.raises(IllegalTransition, match=f"'{cause}' in state '{state}'"):
            after(state, cause)


def test_nothing_leads_out_of_the_end() -> None:
    """A choice ends once."""
    assert not [cause for state, cause in TRANSITIONS if state == "ended"]


@pytest.mark.parametrize("state", [state for state in STATES if state != "ended"])
def test_every_state_can_be_cancelled_fail_and_be_left(state: SagaState) -> None:
    """Whatever a choice does, the client may leave, and there is an error to end with."""
    assert {after(state, "cancelled"), after(state, "failed")} == {"ended"}
    reached, fresh = {state}, [state]
    while fresh:
        fresh = [
            new
            for at in fresh
            for (before, _), new in TRANSITIONS.items()
            if before == at and new not in reached
        ]
        reached |= set(fresh)
    assert {"decode", "ended"} <= reached


def test_setbacks_never_lead_forward() -> None:
    """They lead to a state in which a worker is looked for, so each is followed by another try or an end."""
    assert {new for (_, cause), new in TRANSITIONS.items() if cause in SETBACKS} == {"routing", "handoff"}
    assert [
        state for (state, cause), new in TRANSITIONS.items() if new == "handoff" and cause in SETBACKS
    ] == ["handoff"]
