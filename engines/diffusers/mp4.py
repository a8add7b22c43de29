"""Frames to an mp4 file with H.264, which every browser plays."""

import tempfile
from pathlib import Path
from typing import Any, Final

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
