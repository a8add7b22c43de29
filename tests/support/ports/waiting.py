"""Waiting for a condition instead of sleeping: as the shipped checks of engines do."""

from headwater.engines.conformance.case import POLL_S, eventually

__all__ = ["POLL_S", "eventually"]
