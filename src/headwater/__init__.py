"""Headwater: an event-sourced, KV-cache-aware serving fleet for large language models."""

__version__ = "0.1.0"
