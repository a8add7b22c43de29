"""Marks for tests that import what takes seconds to import: all of a kind run in one worker, so that one pays for it.

Such a test imports it itself: a module's imports are paid by every worker, while it collects tests.
"""

import pytest

OFFICIAL_CLIENT = pytest.mark.xdist_group("official clients")
"""Imports a client's library (openai, anthropic)."""

TORCH = pytest.mark.xdist_group("vllm")
"""Imports torch, which the worker of the tests with vLLM has loaded."""
