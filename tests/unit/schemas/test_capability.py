"""What follows from the capabilities of a worker."""

import pytest

from headwater.schemas.media import PromptMediaKind
from headwater.schemas.tables import Capability, kinds_encoded


@pytest.mark.parametrize(
    ("taken", "capabilities", "kinds"),
    [
        (("image",), {"encode"}, ("image",)),
        (("image", "video", "audio"), {"encode", "videos", "audio"}, ("image", "video", "audio")),
        (("image", "video"), {"encode"}, ("image",)),
        (("audio",), {"encode", "audio"}, ("audio",)),
        ((), {"encode", "videos"}, ()),
        (("image", "video", "audio"), {"videos", "audio"}, ()),
    ],
)
def test_an_encode_worker_encodes_kinds_that_its_model_takes(
    taken: tuple[PromptMediaKind, ...], capabilities: set[Capability], kinds: tuple[PromptMediaKind, ...]
) -> None:
    """A model for audio takes no images, although every encode worker of images is capable of `encode` alone."""
    assert kinds_encoded(taken, capabilities) == kinds
