"""Releases of TensorRT-LLM that are not started."""

import pytest
from structlog.testing import capture_logs

from headwater.engines.engine import EngineUnavailable
from headwater.engines.tensorrt_llm.config import RELEASES


def test_release_with_a_known_vulnerability_is_rejected_unless_allowed() -> None:
    with pytest.raises(
        EngineUnavailable, match=r"CVE-2025-23254.*install 0\.18\.2 or newer.*--allow vulnerable"
    ):
        RELEASES.check("0.18.1", allow=False)
    with capture_logs() as lines:
        RELEASES.check("0.18.1", allow=True)
    assert [line["event"] for line in lines] == ["vulnerable_version", "old_version"]


@pytest.mark.parametrize(
    ("version", "logged"),
    [("0.18.2", ["old_version"]), ("1.2.0", []), ("1.3.0rc20", []), ("", []), ("0.0.0", [])],
)
def test_release_without_one_starts(version: str, logged: list[str]) -> None:
    """An older one than its API was written from with a warning; a build from source has no number."""
    with capture_logs() as lines:
        RELEASES.check(version, allow=False)
    assert [line["event"] for line in lines] == logged
