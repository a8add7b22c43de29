"""Clients of other projects, and conformance suites, against one fleet whose engine replays recorded outputs."""
