"""Retired events, which are no longer written, and their conversion to the events that replaced them.

Fields of an event are only appended, with defaults. Any other change is a new tag: the old struct moves here under its old
tag, with a function that converts it to its replacement, so that readers handle only current events. A struct stays here
as long as logs may contain it.
"""

from collections.abc import Callable
from typing import Any

from headwater.schemas.events.event import Event

Upcasters = dict[type[Event], Callable[[Any], Event]]

UPCASTERS: Upcasters = {}
"""Each retired event's conversion, to the event that replaced it or to a retired one between them."""
