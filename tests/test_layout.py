"""The package is imported under one name only."""

import sys

import headwater
import headwater.events.log


def test_nothing_is_imported_under_its_bare_name() -> None:
    """A second module object of one file would have its own classes."""
    assert headwater.__version__
    bare = {"actors", "events", "router", "engines", "schemas", "ops"}
    assert not bare & set(sys.modules)
