"""An engine of another package, with options of its own: all that it touches is this folder and a line of entry points."""

from typing import Annotated, NamedTuple

from msgspec import Meta

from headwater.engines.traits import EngineTraits


class RiverOptions(NamedTuple):
    """Options of the river."""

    source: Annotated[str, Meta(description="where the river begins")] = "a spring"
    stones: Annotated[int, Meta(ge=0, description="stones that it passes")] = 0
    mouth: Annotated[str, Meta(description="where the river ends")] = "the sea"


TRAITS = EngineTraits(title="River", options=RiverOptions)
