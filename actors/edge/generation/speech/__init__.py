"""Recordings to transcribe: decoded, cut into what a model hears at once, and what its decoder begins with."""
