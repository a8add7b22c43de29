"""Kinds of media in prompts, and their names in messages for people."""

from typing import Final, Literal

PromptMediaKind = Literal["image", "video", "audio", "recording"]

SAMPLED_FRAMES: Final = 32
"""The number of frames that a video is sampled to where an engine's settings state none: vLLM's own default, for all engines."""

ONE: Final[dict[PromptMediaKind, str]] = {
    "image": "an image",
    "video": "a video",
    "audio": "an audio clip",
    "recording": "a recording",
}
SEVERAL: Final[dict[PromptMediaKind, str]] = {
    "image": "images",
    "video": "videos",
    "audio": "audio clips",
    "recording": "recordings",
}
"""Their plurals, for messages for people."""
