"""Models by name, against servers of these tests."""
