"""Events that are not written any more, and what each became.

Fields of an event are only ever appended, with defaults. Any other change is a new tag: the old struct moves here
under its old tag, with a function from it to what replaced it. Readers then never meet it. A struct here is for
ever, like the logs that hold it.
"""

from collections.abc import Callable
from typing import Any

from headwater.schemas.envelope import Event
from headwater.schemas.request import RequestRouted


class RequestRoutedV1(Event, frozen=True, tag="req.routed"):
    """Written by schema version 1, which told neither the choice nor the decision."""

    request: str
    worker: str
    epoch: int
    decision_position: int
    emitted_tokens: int


RetiredEvent = RequestRoutedV1


def _routed(old: RequestRoutedV1) -> RequestRouted:
    return RequestRouted(old.request, 0, "", old.worker, old.epoch, old.emitted_tokens)


UPCASTERS: dict[type[Event], Callable[[Any], Event]] = {RequestRoutedV1: _routed}
