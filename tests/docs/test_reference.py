"""The reference pages say what the code says."""

import re
import subprocess
import sys
from itertools import chain

import pytest
from docs._reference import http_api, log_events

from tests.docs.pages import ROOT


def test_the_generated_pages_are_current() -> None:
    """In a process of its own: metrics are registered once in a process."""
    done = subprocess.run(
        [sys.executable, "-m", "docs._reference", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_log_event_is_described() -> None:
    """A new event needs a meaning and an action in `docs/_reference/log_events.toml`; a removed one leaves it."""
    logged = {event.name for event in log_events.logged()}
    described = set(log_events.read())
    assert not logged - described, "without a description"
    assert not described - logged, "described, but not logged"


def test_log_events_name_flags_that_exist() -> None:
    """What to do about an event is written by hand."""
    named = set(re.findall(r"--[a-z][a-z-]+", " ".join(chain.from_iterable(log_events.read().values()))))
    known = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert named
    assert not {flag for flag in named if not re.search(rf"`{flag}\b(?!-)", known)}


def test_every_route_is_described() -> None:
    assert http_api.routes() == set(http_api.ROUTES)


@pytest.mark.parametrize("header", [h for h in http_api.RESPONSE_HEADERS if h.startswith("x-")])
def test_response_headers_exist(header: str) -> None:
    edge = ROOT / "actors" / "edge"
    assert any(f'"{header}"' in path.read_text() for path in edge.rglob("*.py"))
