"""Options of the engine: the fields of `--engine-options`. Light to import."""

from typing import Annotated, Any

import msgspec

from headwater.engines.engine import EngineUnavailable

Count = Annotated[int, msgspec.Meta(ge=1)]
OrDefault = Annotated[int, msgspec.Meta(ge=0)]


class SglangDiffusionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`python`: the interpreter of the environment that has `sglang[diffusion]`, "": this one's. `args` are further arguments
    of its server, `start_s` is how long it may take to load the model. `allow_vulnerable` starts releases that are refused.

    `width`, `height`, `frames`, `fps` and `steps` are what a request that leaves them out gets, 0: the model's own. The others
    bound what one request may ask for: SGLang's server does not publish what its pipelines can do. `inputs_max`: images that an edit may have.
    """

    python: str = ""
    args: tuple[str, ...] = ()
    allow_vulnerable: bool = False
    start_s: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    width: OrDefault = 0
    height: OrDefault = 0
    frames: OrDefault = 0
    fps: OrDefault = 0
    steps: OrDefault = 0
    steps_max: Count = 200
    side_multiple: Count = 16
    side_min: Count = 64
    side_max: Count = 2_048
    pixels_max: Count = 1_280 * 720
    frames_multiple: Count = 4
    seconds_max: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    images_max: Count = 10
    inputs_max: Count = 1


def read_options(options: dict[str, Any]) -> SglangDiffusionOptions:
    """Raises `EngineUnavailable` naming the option at fault."""
    try:
        return msgspec.convert(options, SglangDiffusionOptions)
    except msgspec.ValidationError as error:
        raise EngineUnavailable(f"--engine-options of the sglang_diffusion engine: {error}") from error
