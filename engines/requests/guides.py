"""Values of a request's guide, the structure that its answer must have, as the adapters need them."""

from typing import Any

import msgspec

from headwater.engines.engine import RequestRejected
from headwater.schemas.messages.inference import Guide


def decode_guide(guide: Guide, kind: Any) -> Any:
    """The value of a guide in JSON, of type `kind`. Raises `RequestRejected`."""
    try:
        return msgspec.json.decode(guide.value.encode(), type=kind)
    except msgspec.DecodeError as error:
        raise RequestRejected(f"guide {guide.kind}: {error}") from error


def guide_choices(guide: Guide) -> list[str]:
    """The texts of a guide of kind `choice`. Raises `RequestRejected` if there are none."""
    choices: list[str] = decode_guide(guide, list[str])
    if not choices:
        raise RequestRejected("guide choice: give one or more texts to choose from")
    return choices


def guide_text(guide: Guide) -> str:
    """The text of a guide. Raises `RequestRejected` if it is empty."""
    if not guide.value:
        raise RequestRejected(f"guide {guide.kind}: it is empty")
    return guide.value
