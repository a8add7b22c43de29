"""Policies that make no sense, and the guide's list of codes."""

import re

import pytest

from headwater.actors.media.intake import MediaIntake
from headwater.actors.media.request import FetchPolicy, MediaCode
from headwater.ops.config.sections import MediaSettings
from tests.tidy.source import ROOT


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (FetchPolicy(networks=("10.0.0.1/8",)), "host bits"),
        (FetchPolicy(networks=("inside",)), "does not appear to be"),
        (FetchPolicy(directories=("media",)), "no absolute path"),
        (FetchPolicy(directories=("/srv/../etc",)), "no absolute path"),
        (FetchPolicy(hosts=tuple(f"host-{n}.example" for n in range(10_000))), "too long"),
    ],
)
def test_a_policy_that_makes_no_sense_is_an_error_at_start(policy: FetchPolicy, message: str) -> None:
    """Not with the first request."""
    with pytest.raises(ValueError, match=message):
        MediaIntake(policy)


def test_the_settings_have_the_limits_by_kind() -> None:
    """A model's own limits are these with fields replaced."""
    limits = MediaSettings().limits
    assert limits.image.pixels_max == 40_000_000
    assert limits.video.bytes_max > limits.image.bytes_max


def test_the_guide_lists_every_code() -> None:
    """And no other."""
    text = (ROOT / "docs" / "guides" / "media.md").read_text()
    found = set(re.findall(r"`(media_[a-z_0-9]+)`", text))
    # A log event of that name, which is no answer to a client.
    assert found - {"media_processor_differs"} == {code.value for code in MediaCode}
