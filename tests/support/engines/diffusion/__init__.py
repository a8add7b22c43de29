"""Pipelines of diffusers for tests."""
