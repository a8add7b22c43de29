"""Ids that models write are kept where a client can use them."""

from itertools import count

import pytest

from headwater.actors.edge.answer.choice import CallIds
from headwater.actors.edge.prompt.request import ToolCall, Turn

EARLIER = (
    Turn(role="assistant", calls=(ToolCall("functions.bash:0", "bash", "{}"), ToolCall("0", "bash", "{}"))),
)


def ids(endpoint: str) -> CallIds:
    numbers = count()
    return CallIds(lambda: f"new{next(numbers)}", EARLIER, endpoint)


@pytest.mark.parametrize(
    ("endpoint", "written", "wanted"),
    [
        ("chat", ["functions.bash:1", "9UMdqmBrZ"], ["functions.bash:1", "9UMdqmBrZ"]),
        ("responses", ["functions.bash:1"], ["functions.bash:1"]),
        # Anthropic's clients could not send it back.
        ("messages", ["functions.bash:1", "9UMdqmBrZ"], ["call_new0", "9UMdqmBrZ"]),
        # Of the conversation, and of this answer.
        ("chat", ["functions.bash:0", "0", "1", "1"], ["call_new0", "call_new1", "1", "call_new2"]),
        ("chat", ["", ""], ["call_new0", "call_new1"]),
    ],
)
def test_an_id_is_kept_where_it_is_new_and_usable(
    endpoint: str, written: list[str], wanted: list[str]
) -> None:
    chooser = ids(endpoint)
    assert [chooser.choose(one) for one in written] == wanted
