"""Where `make sglang` installs SGLang, and whether this is it."""

import importlib.util
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
PYTHON: Final = ROOT / ".sglang" / "bin" / "python"

HERE: Final = importlib.util.find_spec("sglang") is not None
"""Is this Python that environment's?"""
