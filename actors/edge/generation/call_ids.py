"""Ids of tool calls: the model's own where it writes one that can be used, else new ones. Pure but for what makes these."""

import re
from collections.abc import Callable, Iterable
from typing import Final

from headwater.actors.edge.generation.messages.turn import Turn

PREFIX: Final = "call_"

MESSAGES_ID: Final = re.compile(r"[a-zA-Z0-9_-]+\Z")
"""What Anthropic's API demands of an id, also of one that it gave itself: its clients send it back."""


class CallIds:
    """The ids of one answer's calls. Models count their calls from zero in each answer: an id of the conversation is not given again."""

    def __init__(self, make: Callable[[], str], turns: Iterable[Turn], endpoint: str) -> None:
        self._make = make
        self._taken = {call.id for turn in turns for call in turn.calls}
        self._is_strict = endpoint == "messages"

    def choose(self, written: str) -> str:
        """The id of a call for which the model wrote this one, "" for none."""
        usable = written not in self._taken and (not self._is_strict or MESSAGES_ID.match(written))
        chosen = written if written and usable else PREFIX + self._make()
        self._taken.add(chosen)
        return chosen
