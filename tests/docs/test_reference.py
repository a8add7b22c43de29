"""The reference pages say what the code says."""

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import chain

import pytest
from docs._reference import http_api, log_events

from headwater.schemas import subjects
from tests.docs.pages import ROOT


def test_the_generated_pages_are_current() -> None:
    """In a process of its own: metrics are registered once in a process.

    A new log event needs a meaning and an action in `docs/_reference/log_events.toml`, and a removed one leaves it: without that no page is made.
    """
    done = subprocess.run(
        [sys.executable, "-m", "docs._reference", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


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


def test_every_subject_is_described() -> None:
    """Each one that the module spells has a row, and each row has one: rows are written by hand."""
    rows = [re.sub(r"<[^>]+>", "*", row) for row in re.findall(r"^hw\.\S+", str(subjects.__doc__), re.M)]
    made = {_example(make) for _, make in inspect.getmembers(subjects, inspect.isfunction)}
    spelled = {one for one in made if one.startswith("hw.") and not one.endswith(">")}
    assert {one for one in spelled if not any(subjects.matches(row, one) for row in rows)} == set()
    assert {row for row in rows if not any(subjects.matches(row, one) for one in spelled)} == set()


def _example(make: Callable[..., object]) -> str:
    """What a function of the module returns for arguments named like its parameters; "" if it takes a subject apart."""
    given = {"epoch": 1, "kind": "load"}
    names = inspect.signature(make).parameters
    try:
        return str(make(**{name: given.get(name, name) for name in names}))
    except (TypeError, ValueError, IndexError):
        return ""
