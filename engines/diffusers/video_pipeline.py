"""A text-to-video pipeline of diffusers, run step by step. Everything here blocks."""

import tempfile
import threading
from pathlib import Path
from typing import Any, Final

from headwater.engines.diffusers.loaded import GenerationStopped, LoadedPipeline
from headwater.engines.diffusers.options import DiffusersOptions
from headwater.engines.engine import EmitFile, FileStep
from headwater.schemas.messages.file_generation import VideoRequest
from headwater.schemas.tables.card import VideoGenerationSupport

QUALITY: Final = "18"
"""x264's constant rate factor: visually lossless."""


def encode_mp4(frames: Any, fps: int) -> bytes:
    """The file. `frames`: a numpy array (frames, height, width, 3) with values from 0 to 1; both sides are even."""
    import av
    import numpy as np

    pixels = np.rint(np.clip(np.asarray(frames), 0.0, 1.0) * 255.0).astype(np.uint8)
    _, height, width, _ = pixels.shape
    with tempfile.NamedTemporaryFile(suffix=".mp4") as written:
        # The index first, for which FFmpeg opens the file again: a player can begin before it has all of it.
        with av.open(written.name, "w", format="mp4", options={"movflags": "faststart"}) as container:
            stream = container.add_stream("libx264", rate=fps, options={"crf": QUALITY})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for picture in pixels:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return Path(written.name).read_bytes()


FPS_DEFAULT: Final = 16
FRAMES_DEFAULT: Final = 81
WIDTH_DEFAULT: Final = 832
HEIGHT_DEFAULT: Final = 480
"""Of pipelines that state none."""


class TextToVideo:
    """Generates videos with a loaded pipeline. `support` says which."""

    def __init__(self, loaded: LoadedPipeline, options: DiffusersOptions) -> None:
        self._loaded = loaded
        self.support = self._supported(options)

    def _supported(self, options: DiffusersOptions) -> VideoGenerationSupport:
        loaded = self._loaded
        multiple, smallest, frames_multiple = loaded.side_multiple, loaded.side_min, loaded.frames_multiple
        fps = options.fps or loaded.default("frame_rate") or FPS_DEFAULT
        steps, steps_max = loaded.steps(options)
        # As durations of requests are rounded: one of `seconds_max` is possible.
        frames_max = round(max(0.0, options.seconds_max * fps - 1) / frames_multiple) * frames_multiple + 1
        frames = loaded.default("num_frames") or FRAMES_DEFAULT
        frames = min(frames - 1, frames_max - 1) // frames_multiple * frames_multiple + 1
        width = max(smallest, (loaded.default("width") or WIDTH_DEFAULT) // multiple * multiple)
        height = max(smallest, (loaded.default("height") or HEIGHT_DEFAULT) // multiple * multiple)
        if width * height > options.pixels_max or max(width, height) > options.side_max:
            width = height = smallest
        return VideoGenerationSupport(
            width=width,
            height=height,
            side_multiple=multiple,
            side_min=smallest,
            side_max=max(width, height, options.side_max),
            pixels_max=max(width * height, options.pixels_max),
            fps=fps,
            frames=frames,
            frames_multiple=frames_multiple,
            frames_max=frames_max,
            steps=steps,
            steps_max=steps_max,
        )

    def generate(self, request: VideoRequest, emit: EmitFile, stopped: threading.Event) -> None:
        """Generate the video; returns early once `stopped` is set."""

        def on_step(_: Any, step: int, __: Any, ___: dict[str, Any]) -> dict[str, Any]:
            if stopped.is_set():
                raise GenerationStopped
            emit(FileStep(0, min(step + 1, request.steps)))
            return {}

        loaded = self._loaded
        with loaded.failures("video"):
            if stopped.is_set():
                raise GenerationStopped
            arguments = loaded.arguments(request, request.seed, on_step) | {"num_frames": request.frames}
            if "frame_rate" in loaded.parameters:
                arguments["frame_rate"] = request.fps
            if "output_type" in loaded.parameters:
                arguments["output_type"] = "np"
            frames = loaded.pipe(**arguments).frames[0]
            emit(FileStep(0, request.steps, encode_mp4(frames, request.fps)))
