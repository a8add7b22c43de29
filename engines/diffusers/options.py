"""Options of the diffusers engine: the fields of `--engine-options`. Light to import."""

from typing import Annotated, Any, Literal

import msgspec

from headwater.engines.engine import EngineUnavailable

Count = Annotated[int, msgspec.Meta(ge=1)]


class DiffusersOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`device` "": a GPU if there is one. `dtype` "auto": bfloat16 on a GPU, float32 on a CPU. `threads`
    on CPUs, 0: as many as torch chooses, which is too many for several workers on one machine. `steps` 0: the pipeline's default.

    `fps`: frames that videos show per second, 0: the pipeline's. Sides in pixels, `pixels_max` those of a video's frame.
    The others bound what one request may ask for.
    """

    device: str = ""
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    threads: Annotated[int, msgspec.Meta(ge=0)] = 0
    steps: Annotated[int, msgspec.Meta(ge=0)] = 0
    steps_max: Count = 200
    side_max: Count = 2_048
    images_max: Count = 10
    pixels_max: Count = 1_280 * 720
    seconds_max: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    fps: Annotated[int, msgspec.Meta(ge=0)] = 0


def read_options(options: dict[str, Any]) -> DiffusersOptions:
    """Raises `EngineUnavailable` naming the option at fault."""
    try:
        return msgspec.convert(options, DiffusersOptions)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"--engine-options of the diffusers engine: {error}") from error
